"""The scheduler that plans a step while the one before it runs."""

from control_plane.scheduling.batching import BatchingScheduler


class RunAheadScheduler(BatchingScheduler):
    """Two plans in flight: the worker finds its next step waiting. A stop found late costs one row of a step."""

    max_plans_in_flight = 2
