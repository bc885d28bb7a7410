"""Nodes that find each other in a registry, and read each other's DRAM."""
