"""Every example of docs/api.md does what the page says, against a server of its own."""

import asyncio
import json
import re
import sys

from tests.architecture.sources import ROOT
from tests.end_to_end.processes import FREE_PORTS, TINY, dihedral

EXAMPLE = re.compile(r"^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ADDRESS = "127.0.0.1:50051"  # as the page has it


async def run_example(language: str, text: str) -> str:
    """Run one example in the root of the repository; returns what it prints."""
    program = ("bash", "-euc") if language == "bash" else (sys.executable, "-c")
    process = await asyncio.create_subprocess_exec(
        *program, text, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert (process.returncode, err.decode()) == (0, ""), text
    return out.decode()


async def test_the_examples_of_the_page_work_as_they_stand() -> None:
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    examples = [(language, text) for language, text in EXAMPLE.findall(page)]

    async with dihedral("serve", *TINY, *FREE_PORTS) as server:
        await server.ready()
        assert all(ADDRESS in text for _, text in examples)
        said = [await run_example(language, text.replace(ADDRESS, server.address)) for language, text in examples]

    methods, text, chat, python, outputs, admin, events, health = said
    assert "dihedral.inference.v1.InferenceService/Generate" in methods.splitlines()
    for stream in (text, chat):
        assert re.search(r'"finishReason": "FINISH_REASON_(LENGTH|STOP)"', stream)
    assert re.fullmatch(r"FINISH_REASON_(LENGTH|STOP), \d+ tokens", python.splitlines()[-1])
    assert re.fullmatch(r"([01] \d+ -\d+\.\d+ rank \d+\n)+\d+ tokens of both\n", outputs)
    assert re.fullmatch(r"\S+ LINK_LIVE \S+\nINTAKE_PAUSED INTAKE_OPEN\n", admin)
    assert re.search(r" stored\n\d+ blocks of \d+ tokens under [0-9a-f]+\n$", events)
    assert json.loads(health) == {"status": "SERVING"}
