"""Attention over stretches of KV that stand elsewhere than their keys were computed: see `plan.py`. What comes out are
partial results, which decode and prefill attention merge with those over a sequence's own chunks."""

from kvstore.kernels.stretches.plan import Stretch, StretchPlan, Viewer, check_stretch, plan_stretches

__all__ = ["Stretch", "StretchPlan", "Viewer", "check_stretch", "plan_stretches"]
