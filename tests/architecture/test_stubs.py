"""The committed stubs are what the .proto files give."""

from pathlib import Path

from protos.generate import generate
from tests.architecture.sources import ROOT, files, is_stub


def test_the_committed_stubs_are_those_that_protoc_writes_today(tmp_path: Path) -> None:
    generate(tmp_path)

    written = {path: (tmp_path / path).read_bytes() for path in files(tmp_path)}
    committed = {path: (ROOT / path).read_bytes() for path in files() if is_stub(path)}
    assert sorted(written) == sorted(committed)
    assert [path for path in written if written[path] != committed[path]] == []
