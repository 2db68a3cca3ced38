"""Mission: a squad crosses a map with walls and patrols and holds an objective. Plain Python and NumPy on purpose."""

from flatout.workloads.mission.mission import Mission

__all__ = ["Mission"]
