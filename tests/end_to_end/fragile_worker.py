"""A worker that dies of one prompt: `dihedral worker`, but a plan that admits a prompt of FATAL ends the process."""

import os
import sys
from unittest.mock import patch

import gpu_worker.factory
from control_plane.cli import main
from gpu_worker.worker import Worker
from plugins.types import StepPlan, TokenId

FATAL = TokenId(99)  # as the first token of a prompt


class FragileWorker(Worker):
    """Computes as any other until the fatal prompt comes."""

    def submit(self, plan: StepPlan) -> None:
        if any(admission.token_ids[0] == FATAL for admission in plan.admitted):
            os._exit(1)
        super().submit(plan)


if __name__ == "__main__":
    with patch.object(gpu_worker.factory, "Worker", FragileWorker):
        sys.exit(main())
