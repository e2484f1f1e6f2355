"""Tools for testing jobs: a cluster of virtual nodes on one machine."""

from __future__ import annotations

from rlmesh.testing.local_cluster import LocalCluster as LocalCluster

__all__ = ["LocalCluster"]
