"""What a control plane tells of itself and its workers, as the results that commands show."""

from collections.abc import Sequence
from dataclasses import replace

from control_plane.cli.results import GenerationStatus, IntakeStatus, ServerStatus, WorkerIntake, WorkerStatus
from protos.admin.v1 import admin_pb2
from protos.channel import MIB


def server_status(
    address: str,
    readiness: str,
    server: admin_pb2.GetServerInfoResponse,
    listed: admin_pb2.ListWorkersResponse,
) -> ServerStatus:
    """Put the answers about one server together."""
    return ServerStatus(
        address=address,
        readiness=readiness,
        version=server.version,
        uptime_s=server.uptime_s,
        intake=intake_word(server.intake),
        num_running=server.num_running,
        num_waiting=server.num_waiting,
        max_waiting=server.max_waiting,
        num_waiting_tokens=server.num_waiting_tokens,
        max_waiting_tokens=server.max_waiting_tokens,
        workers=tuple(_worker(worker) for worker in listed.workers),
        generations=_generations(listed.workers),
    )


def intake_status(report: admin_pb2.IntakeReport) -> IntakeStatus:
    """Read what new requests meet."""
    workers = [WorkerIntake(worker=worker.worker_id, intake=intake_word(worker.intake)) for worker in report.workers]
    return IntakeStatus(server_intake=intake_word(report.server), workers=tuple(workers))


def intake_word(intake: admin_pb2.Intake.ValueType) -> str:
    """Name an intake as people do: open, paused, draining."""
    return admin_pb2.Intake.Name(intake).removeprefix("INTAKE_").lower()


def _worker(worker: admin_pb2.Worker) -> WorkerStatus:
    status = WorkerStatus(
        worker=worker.worker_id,
        link=admin_pb2.Link.Name(worker.link).removeprefix("LINK_").lower(),
        intake=intake_word(worker.intake),
        detail="; ".join(filter(None, (worker.detail, _leaving(worker)))),
    )
    if not worker.HasField("model"):
        return status
    return replace(
        status,
        generation=_short(worker),
        num_running=worker.num_running,
        num_waiting=worker.num_waiting,
        free_blocks=worker.num_free_blocks,
        cached_blocks=worker.num_cached_blocks,
        hit_rate=f"{worker.prefix_hits / worker.prefix_tokens:.0%}" if worker.prefix_tokens else None,
        generation_id=worker.generation,
        model=worker.model.name,
        num_blocks=worker.num_blocks,
        kv_mib=worker.kv_bytes / MIB,
        load_s=worker.load_s,
        num_preemptions=worker.num_preemptions,
        prefix_tokens=worker.prefix_tokens,
        prefix_hits=worker.prefix_hits,
    )


def _leaving(worker: admin_pb2.Worker) -> str:
    """Tell what becomes of the requests of a worker whose address is gone; of another one there is nothing to tell."""
    if not worker.is_leaving:
        return ""
    if worker.link == admin_pb2.LINK_LIVE and worker.intake != admin_pb2.INTAKE_PAUSED:
        return "its address is gone: it finishes what it has"
    return "its address is gone, and it will be removed"


def _generations(workers: Sequence[admin_pb2.Worker]) -> tuple[GenerationStatus, ...]:
    """Tell of each generation once, the newest of a model first."""
    members: dict[str, list[admin_pb2.Worker]] = {}
    for worker in workers:
        if worker.HasField("model") and worker.generation:
            members.setdefault(worker.generation, []).append(worker)
    found = [_generation(of_one) for of_one in members.values()]
    return tuple(sorted(found, key=lambda each: (each.model, each.state != "newest")))


def _generation(members: Sequence[admin_pb2.Worker]) -> GenerationStatus:
    worker = members[0]
    takes_new = worker.is_newest_generation and not all(each.is_leaving for each in members)
    return GenerationStatus(
        generation=_short(worker),
        state="newest" if takes_new else "draining",
        differs=", ".join(worker.generation_difference),
        live_workers=f"{sum(each.link == admin_pb2.LINK_LIVE for each in members)} of {len(members)}",
        num_blocks=sum(each.num_blocks for each in members),
        model=worker.model.name,
        dtype=worker.model.dtype,
        parameters=worker.model.num_parameters,
        context=worker.model.max_model_len,
        block_size=worker.block_size,
        kv_cache_dtype=worker.kv_cache_dtype,
        weights_version=worker.weights_version,
        plugins=", ".join(worker.plugins),
    )


def _short(worker: admin_pb2.Worker) -> str:
    """What tells generations of one model apart."""
    return worker.generation.removeprefix(f"{worker.model.name}-")
