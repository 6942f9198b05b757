"""Writes what happened to cached blocks as messages for routers that stand outside.

Translates; what the events mean is said in `plugins/kv_events.py`.
"""

from plugins.kv_events import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from plugins.types import WorkerId
from protos.admin.v1 import admin_pb2


def encode_kv_event(worker_id: WorkerId, seq: int, event: KvEvent) -> admin_pb2.KvEvent:
    """Write one event; `seq` counts those of this worker that this subscriber was sent."""
    match event:
        case BlocksStored():
            stored = admin_pb2.BlocksStored(
                block_hashes=event.block_hashes,
                parent_hash=event.parent_hash,
                token_ids=event.token_ids,
                block_size=event.block_size,
            )
            return admin_pb2.KvEvent(worker_id=worker_id, seq=seq, stored=stored)
        case BlocksRemoved():
            removed = admin_pb2.BlocksRemoved(block_hashes=event.block_hashes)
            return admin_pb2.KvEvent(worker_id=worker_id, seq=seq, removed=removed)
        case BlocksCleared():
            return admin_pb2.KvEvent(worker_id=worker_id, seq=seq, cleared=admin_pb2.BlocksCleared())
