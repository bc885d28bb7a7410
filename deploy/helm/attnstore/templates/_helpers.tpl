{{- define "attnstore.name" -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "attnstore.selector" -}}
app.kubernetes.io/name: attnstore
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "attnstore.labels" -}}
{{ include "attnstore.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "attnstore.toml" -}}
run_dir = "/run/kvstored"
{{- if .Values.ssd.enabled }}
ssd_dir = "/var/lib/kvstored/tier"
ssd_bytes = {{ .Values.ssd.bytes | toJson }}
{{- end }}
{{- if .Values.metrics.port }}
metrics_host = "0.0.0.0"
metrics_port = {{ .Values.metrics.port }}
{{- end }}
{{- if .Values.accessSecret }}
access_file = "/etc/kvstored-access/access.toml"
{{- end }}
{{- if .Values.tlsSecret }}
tls_certificate = "/etc/kvstored-tls/tls.crt"
tls_key = "/etc/kvstored-tls/tls.key"
{{- end }}
{{- range $name, $value := .Values.settings }}
{{ $name }} = {{ if kindIs "map" $value }}{ {{- range $i, $key := keys $value | sortAlpha }}{{ if $i }}, {{ end }}{{ toJson $key }} = {{ include "attnstore.number" (index $value $key) }}{{ end -}} }{{ else }}{{ include "attnstore.number" $value }}{{ end }}
{{- end }}
{{- if .Values.tenants }}

[tenants]
{{- range $uid, $tenant := .Values.tenants }}
{{ $uid }} = {{ toJson $tenant }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* A value of TOML: Helm reads every number as a float. */ -}}
{{- define "attnstore.number" -}}
{{- if kindIs "float64" . }}{{ if eq (floor .) . }}{{ printf "%.0f" . }}{{ else }}{{ . }}{{ end }}{{ else }}{{ toJson . }}{{ end -}}
{{- end -}}
