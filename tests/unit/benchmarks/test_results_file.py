"""What a file of figures looks like."""

import json
from pathlib import Path

from benchmarks.results_file import write_results


def test_every_run_has_a_line_and_the_file_is_json(tmp_path: Path) -> None:
    results = {"machine": {"cpu": "some", "cores": 2}, "runs": [{"us": 1.5}, {"us": 2.5}], "missed": []}

    write_results(tmp_path / "file.json", results)

    text = (tmp_path / "file.json").read_text()
    assert json.loads(text) == results
    assert text.splitlines()[5:9] == [' "runs": [', '  {"us": 1.5},', '  {"us": 2.5}', " ],"]
