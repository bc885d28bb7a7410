"""The daemon as a process: start and end, its loop, logs, metrics, health. Imports every other room."""
