"""The names of blocks: what they depend on, and that nothing else can look the same."""

import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from control_plane.kv.hashing import BlockHash, BlockHasher, CacheScope, encode_scope, hasher_for
from plugins.types import RequestId, TokenId
from tests.fakes import request

KEY = b"0123456789abcdef"
SCOPE = CacheScope(cache_salt="s", kv_cache_dtype="float32", weights_version="w1", model="tiny")
ROOT = "411d9e12cd6340c615563a2891a2edea"
CHAIN = ["7c8923d1afe0367c6d92898e6a1f51e1", "3798347d4511b7cbaa6e362a5139e832"]


def tokens(*token_ids: int) -> tuple[TokenId, ...]:
    return tuple(map(TokenId, token_ids))


def test_hashes_are_keyed_blake2b_of_scope_then_parent_and_tokens() -> None:
    """Computed with hashlib alone from the bytes that the module describes."""
    hasher = BlockHasher(KEY, block_size=4)

    root = hasher.root(SCOPE)
    hashes = hasher.chain(root, tokens(1, 2, 3, 4, 5, 6, 7, 8))

    assert root.hex() == ROOT
    assert [block_hash.hex() for block_hash in hashes] == CHAIN


def test_only_full_blocks_have_hashes() -> None:
    hasher = BlockHasher(KEY, block_size=4)
    root = hasher.root(SCOPE)

    assert hasher.chain(root, ()) == []
    assert hasher.chain(root, tokens(1, 2, 3)) == []
    assert [block_hash.hex() for block_hash in hasher.chain(root, tokens(1, 2, 3, 4, 5, 6, 7))] == CHAIN[:1]


def test_a_chain_goes_on_from_its_last_block() -> None:
    hasher = BlockHasher(KEY, block_size=4)

    rest = hasher.chain(BlockHash(bytes.fromhex(CHAIN[0])), tokens(5, 6, 7, 8))

    assert [block_hash.hex() for block_hash in rest] == CHAIN[1:]


def test_equal_tokens_after_other_tokens_have_another_hash() -> None:
    hasher = BlockHasher(KEY, block_size=4)
    root = hasher.root(SCOPE)

    one = hasher.chain(root, tokens(1, 2, 3, 4, 9, 9, 9, 9))
    other = hasher.chain(root, tokens(4, 3, 2, 1, 9, 9, 9, 9))

    assert one[1] != other[1]


def test_another_key_makes_other_hashes() -> None:
    one, other = BlockHasher(KEY, block_size=4), BlockHasher(KEY + b"x", block_size=4)

    assert one.root(SCOPE) != other.root(SCOPE)
    assert one.chain(BlockHash(bytes(16)), tokens(1, 2, 3, 4)) != other.chain(BlockHash(bytes(16)), tokens(1, 2, 3, 4))


def test_a_key_may_be_longer_than_the_hash_function_takes() -> None:
    one, other = BlockHasher(b"k" * 100, block_size=4), BlockHasher(b"k" * 101, block_size=4)

    assert one.root(SCOPE) != other.root(SCOPE)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (CacheScope(adapter="X"), CacheScope(cache_salt="X")),
        (CacheScope(adapter="X"), CacheScope(model="X")),
        (CacheScope(kv_cache_dtype="X"), CacheScope(weights_version="X")),
        (CacheScope(cache_salt="Xa", adapter="b"), CacheScope(cache_salt="X", adapter="ab")),
        (CacheScope(cache_salt="XA\x01\x00\x00\x00b"), CacheScope(cache_salt="X", adapter="b")),
        (CacheScope(cache_salt=""), CacheScope(cache_salt="\0")),
    ],
)
def test_no_field_of_a_scope_can_pose_as_another(one: CacheScope, other: CacheScope) -> None:
    """Case B064: one field of a scope is worded as another caller's salt."""
    hasher = BlockHasher(KEY, block_size=1)

    first_blocks = [hasher.chain(hasher.root(scope), tokens(1)) for scope in (one, other)]

    assert first_blocks[0] != first_blocks[1]


def test_ten_thousand_scopes_of_a_few_characters_have_as_many_encodings() -> None:
    """B064: short fields of tags, digits and nothing, so that plain concatenation would collide all the time."""
    draw = random.Random(64)
    words = ["", *("S", "A", "D", "SA", "AS", "S\x01", "\0", "\0\0", "\x01\0\0\0", "a", "aa")]
    scopes: set[CacheScope] = set()
    while len(scopes) < 10_000:
        scopes.add(CacheScope(*(draw.choice(words) for _ in range(5))))
    hasher = BlockHasher(KEY, block_size=1)

    assert len({encode_scope(scope) for scope in scopes}) == 10_000
    assert len({hasher.root(scope) for scope in scopes}) == 10_000


def test_any_text_is_a_salt() -> None:
    hasher = BlockHasher(KEY, block_size=1)

    roots = {hasher.root(CacheScope(cache_salt=salt)) for salt in ("\ud800", "\ud801", "é", "e\u0301")}

    assert len(roots) == 4


def test_tokens_whose_python_hashes_meet_have_different_names() -> None:
    """B065: hash(-1) == hash(-2), and 1 == True == 1.0 for a dictionary."""
    hasher = BlockHasher(KEY, block_size=1)
    root = hasher.root(SCOPE)

    assert hasher.chain(root, tokens(-1)) != hasher.chain(root, tokens(-2))
    assert hasher.chain(root, tokens(1)) != hasher.chain(root, tokens(2**31 - 1))


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_every_process_with_the_key_makes_the_same_hashes(seed: str) -> None:
    """B065: PYTHONHASHSEED, which changes Python's own hashes, does not matter."""
    script = (
        "from control_plane.kv.hashing import CacheScope, hasher_for\n"
        f"hasher = hasher_for({KEY!r}, 4)\n"
        f"root = hasher.root({SCOPE!r})\n"
        "print(root.hex(), *(each.hex() for each in hasher.chain(root, range(1, 9))))"
    )

    run = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )

    assert run.stdout.split() == [ROOT, *CHAIN]


def test_a_prompt_is_hashed_once_for_all_that_ask_about_the_same_request() -> None:
    hasher = BlockHasher(KEY, block_size=4)
    asked = request("a", prompt=range(1, 10))

    first = hasher.prompt_hashes(asked, SCOPE)
    again = hasher.prompt_hashes(asked, CacheScope("s", "", "float32", "w1", "tiny"))

    assert first.root.hex() == ROOT
    assert [block_hash.hex() for block_hash in first.hashes] == CHAIN
    assert again is first


def test_a_prompt_is_hashed_once_for_all_outputs_of_a_request() -> None:
    hasher = BlockHasher(KEY, block_size=4)
    first = request("a", prompt=range(1, 10))
    second = replace(first, request_id=RequestId("a·1"), sibling_of=first.request_id)

    assert hasher.prompt_hashes(second, SCOPE) is hasher.prompt_hashes(first, SCOPE)


def test_what_is_remembered_of_one_request_is_not_told_of_another() -> None:
    hasher = BlockHasher(KEY, block_size=4)
    one, same_id = request("a", prompt=range(1, 10)), request("a", prompt=range(2, 11))
    first = hasher.prompt_hashes(one, SCOPE)

    assert hasher.prompt_hashes(same_id, SCOPE).hashes != first.hashes
    assert hasher.prompt_hashes(one, CacheScope(cache_salt="t")).root != first.root
    assert hasher.prompt_hashes(one, SCOPE) == first


def test_schedulers_with_one_key_and_block_size_share_a_hasher() -> None:
    assert hasher_for("0123456789abcdef", 4) is hasher_for("0123456789abcdef", 4)
    assert hasher_for("0123456789abcdef", 4) is not hasher_for("0123456789abcdef", 8)
    assert hasher_for("0123456789abcdef", 4).root(SCOPE).hex() == ROOT
