"""The scheduler that waits for each result before it plans the next step."""

from control_plane.scheduling.batching import BatchingScheduler


class SynchronousScheduler(BatchingScheduler):
    """One plan in flight: what it decides next may depend on every token there is. The worker idles between steps."""

    max_plans_in_flight = 1
