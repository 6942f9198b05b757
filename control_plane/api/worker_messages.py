"""How a worker looks to operators: what it said of itself, its four facts, its load, its generation.

Translates; who knows these things is told by `admin.py`.
"""

from control_plane.engine.facts import Facts, Intake, Link, Residency, Weights
from control_plane.workers.supervisor import WorkerView
from plugins.scheduler import SchedulerLoad
from protos.admin.v1 import admin_pb2
from protos.codec_info import encode_model_info

INTAKES = {
    Intake.OPEN: admin_pb2.INTAKE_OPEN,
    Intake.PAUSED: admin_pb2.INTAKE_PAUSED,
    Intake.DRAINING: admin_pb2.INTAKE_DRAINING,
}
RESIDENCIES = {
    Residency.RESIDENT: admin_pb2.RESIDENCY_RESIDENT,
    Residency.SUSPENDING: admin_pb2.RESIDENCY_SUSPENDING,
    Residency.ASLEEP: admin_pb2.RESIDENCY_ASLEEP,
    Residency.WAKING: admin_pb2.RESIDENCY_WAKING,
}
WEIGHTS = {
    Weights.VALID: admin_pb2.WEIGHTS_VALID,
    Weights.UPDATING: admin_pb2.WEIGHTS_UPDATING,
    Weights.NEEDS_WEIGHTS: admin_pb2.WEIGHTS_NEEDS_WEIGHTS,
}
LINKS = {
    Link.CONNECTING: admin_pb2.LINK_CONNECTING,
    Link.LIVE: admin_pb2.LINK_LIVE,
    Link.LOST: admin_pb2.LINK_LOST,
    Link.FAILED: admin_pb2.LINK_FAILED,
}


def encode_worker(view: WorkerView, facts: Facts, load: SchedulerLoad) -> admin_pb2.Worker:
    """Write a worker; one that was never described has its facts alone."""
    worker = admin_pb2.Worker(
        worker_id=view.worker_id,
        link=LINKS[facts.link],
        intake=INTAKES[facts.intake],
        residency={tag: RESIDENCIES[residency] for tag, residency in facts.residency.items()},
        weights=WEIGHTS[facts.weights],
        detail=view.detail,
        is_leaving=view.is_leaving,
    )
    if view.info is None:
        return worker
    info = view.info
    described = admin_pb2.Worker(
        model=encode_model_info(info.model),
        incarnation=info.incarnation,
        weights_version=info.weights_version,
        plugins=info.plugins,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        kv_cache_dtype=info.kv_cache_dtype,
        kv_bytes=info.kv_bytes,
        load_s=info.load_s,
        generation=view.generation or "",
        is_newest_generation=view.is_newest,
        generation_difference=view.differences,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_free_blocks=load.num_free_blocks,
        num_cached_blocks=load.num_cached_blocks,
        prefix_tokens=load.num_prefix_tokens,
        prefix_hits=load.num_prefix_hits,
        num_preemptions=load.num_preemptions,
    )
    worker.MergeFrom(described)
    return worker
