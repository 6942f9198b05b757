"""The header of a GGUF file: read as the gguf package reads it, and damaged in every place."""

import os
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.loading.gguf_file import read_gguf
from plugins.errors import ModelFileBroken
from tests.unit.gpu_worker.loading.tiny_files import write_gguf


def number(value: int, num_bytes: int = 4) -> bytes:
    return value.to_bytes(num_bytes, "little")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_every_type_of_metadata_is_read_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "values.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -128)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -32768)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 1e300)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("text", "é 漢 😀")
    writer.add_array("texts", ["a", "Ġb", "漢"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("fractions", [0.5, -0.25])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()

    metadata = read_gguf(path).metadata

    theirs = {key: field.contents() for key, field in GGUFReader(path).fields.items() if not key.startswith("GGUF.")}
    assert {key: list(value) if isinstance(value, tuple) else value for key, value in metadata.items()} == theirs
    assert metadata["u64"] == 18446744073709551615
    assert metadata["yes"] is True and metadata["no"] is False
    assert metadata["texts"] == ("a", "Ġb", "漢")


def test_tensors_lie_where_the_gguf_package_finds_them(tiny: Path) -> None:
    tensors = read_gguf(tiny).tensors

    theirs = GGUFReader(tiny).tensors
    assert [(tensor.name, tensor.offset, tensor.num_bytes) for tensor in tensors] == [
        (tensor.name, tensor.data_offset, tensor.n_bytes) for tensor in theirs
    ]
    assert tensors[0].name == "token_embd.weight"
    assert tensors[0].shape == (6, 32)


def test_a_file_cut_at_any_byte_is_refused_with_its_name_and_lengths(tiny: Path, tmp_path: Path) -> None:
    """Nothing is left of the file, or of its magic, header, metadata, table of tensors, or of a tensor."""
    tensors = read_gguf(tiny).tensors
    first, end = tensors[0].offset, tensors[-1].offset + tensors[-1].num_bytes
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes())

    for length in (end - 1, *range(end - 997, first + 8, -997), *range(first + 8, 0, -1)):
        os.truncate(cut, length)
        with pytest.raises(ModelFileBroken, match=rf"cut\.gguf: cut off inside .*the file has {length}"):
            read_gguf(cut)


def test_a_file_cut_inside_a_tensor_names_the_tensor_and_where_it_lies(tiny: Path, tmp_path: Path) -> None:
    tensor = next(tensor for tensor in read_gguf(tiny).tensors if tensor.name == "blk.0.ffn_up.weight")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[: tensor.offset + 100])

    with pytest.raises(ModelFileBroken) as caught:
        read_gguf(cut)

    assert str(caught.value) == (
        f"{cut}: cut off inside tensor blk.0.ffn_up.weight: it lies at bytes "
        f"[{tensor.offset}, {tensor.offset + 8192}), the file has {tensor.offset + 100}; fetch it again"
    )


def test_a_file_cut_inside_the_vocabulary_names_the_entry(tiny: Path, tmp_path: Path) -> None:
    whole = tiny.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: whole.index(b"tokenizer.ggml.tokens") + 50])

    with pytest.raises(ModelFileBroken, match=r"cut off inside metadata tokenizer\.ggml\.tokens: at byte \d+ it needs"):
        read_gguf(cut)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.touch()

    with pytest.raises(ModelFileBroken, match=r"empty\.gguf: the file is empty; fetch it again"):
        read_gguf(path)


def test_a_file_that_is_something_else_is_refused_with_its_first_bytes(tmp_path: Path) -> None:
    path = tmp_path / "pointer.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\n")

    with pytest.raises(ModelFileBroken, match=r"not a GGUF file: it starts with b'vers' instead of b'GGUF'"):
        read_gguf(path)


def test_a_version_that_is_not_known_is_refused_with_those_that_are(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "new.gguf"
    path.write_bytes(b"GGUF" + (9).to_bytes(4, "little") + tiny.read_bytes()[8:])

    with pytest.raises(ModelFileBroken, match=r"GGUF version 9 is not supported; supported: 2, 3"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("before", "replacement", "message"),
    [
        (b"llama.block_count", number(99), r"metadata llama\.block_count has the unknown type 99"),
        (b"tokenizer.ggml.merges", number(9) * 2, r"metadata tokenizer\.ggml\.merges is an array of arrays"),
        (
            b"tokenizer.ggml.pre" + number(8) + number(6, 8),
            b"\xff",
            r"tokenizer\.ggml\.pre holds text that is not UTF-8",
        ),
        (b"output_norm.weight", number(5), r"the entry of tensor output_norm\.weight has 5 dimensions, not 1 to 4"),
        (b"output_norm.weight" + number(1) + number(32, 8), number(99), r"output_norm\.weight has the unknown type 99"),
        (
            b"output_norm.weight" + number(1),
            number(33, 8) + number(8),
            r"output_norm\.weight has rows of 33 numbers, not a multiple of Q8_0's 32",
        ),
    ],
)
def test_a_damaged_entry_is_named(tiny: Path, tmp_path: Path, before: bytes, replacement: bytes, message: str) -> None:
    """The bytes after `before` are replaced, where it first occurs."""
    whole = tiny.read_bytes()
    place = whole.index(before) + len(before)
    path = tmp_path / "damaged.gguf"
    path.write_bytes(whole[:place] + replacement + whole[place + len(replacement) :])

    with pytest.raises(ModelFileBroken, match=rf"damaged\.gguf: .*{message}.*"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("num_tensors", "num_values", "what"), [(2**63, 0, "tensors"), (0, 2**16 + 1, "metadata entries")]
)
def test_a_header_that_counts_more_than_any_model_has_is_refused(
    tmp_path: Path, num_tensors: int, num_values: int, what: str
) -> None:
    path = tmp_path / "huge.gguf"
    path.write_bytes(b"GGUF" + number(3) + number(num_tensors, 8) + number(num_values, 8))

    with pytest.raises(ModelFileBroken, match=rf"huge\.gguf: the header counts \d+ {what}, more than 65536"):
        read_gguf(path)


def test_an_array_longer_than_any_vocabulary_is_refused_before_it_is_read(tmp_path: Path) -> None:
    num_items = 2**24 + 1
    path = tmp_path / "long.gguf"
    array_of_bytes = number(9) + number(0) + number(num_items, 8)
    path.write_bytes(b"GGUF" + number(3) + number(0, 8) + number(1, 8) + number(1, 8) + b"x" + array_of_bytes)
    os.truncate(path, path.stat().st_size + num_items)

    with pytest.raises(ModelFileBroken, match=r"long\.gguf: metadata x is an array of 16777217 items, more than"):
        read_gguf(path)


def test_two_tensors_of_one_name_are_refused(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "twice.gguf"
    path.write_bytes(tiny.read_bytes().replace(b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"))

    with pytest.raises(ModelFileBroken, match=r"twice\.gguf: two tensors have the same name"):
        read_gguf(path)


def test_an_alignment_that_is_no_number_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "odd.gguf", metadata={"general.alignment": "wide"})

    with pytest.raises(ModelFileBroken, match=r"metadata general\.alignment is 'wide', not a positive number"):
        read_gguf(path)


def test_metadata_of_another_type_is_refused_with_both_types(tiny: Path) -> None:
    file = read_gguf(tiny)

    with pytest.raises(ModelFileBroken, match=r"metadata tokenizer\.ggml\.model is a str, not a int"):
        file.get("tokenizer.ggml.model", int)
    with pytest.raises(ModelFileBroken, match=r"metadata has no llama\.nothing"):
        file.get("llama.nothing", int)


@given(damage=st.dictionaries(st.integers(0, 1500), st.integers(0, 255), min_size=1, max_size=4))
def test_damaged_bytes_give_our_error_or_a_header_whose_tensors_lie_inside(tiny: Path, damage: dict[int, int]) -> None:
    content = np.frombuffer(tiny.read_bytes(), dtype=np.uint8).copy()
    for place, byte in damage.items():
        content[place] = byte
    damaged = tiny.with_name("damaged.gguf")
    damaged.write_bytes(content.tobytes())

    try:
        tensors = read_gguf(damaged).tensors
    except ModelFileBroken as error:
        assert str(damaged) in str(error)
    else:
        assert all(0 <= tensor.offset <= tensor.offset + tensor.num_bytes <= len(content) for tensor in tensors)
