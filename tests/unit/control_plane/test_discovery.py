"""Where workers are looked for: lists, names and files, and what is not taken for any of them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest

from control_plane.workers.discovery import (
    AddressFile,
    DnsAddresses,
    DnsName,
    FileAddresses,
    Places,
    StaticAddresses,
    StaticPlaces,
    discovery_of,
    parse_address,
    resolve,
)
from plugins.errors import InvalidConfig


async def no_wait(seconds: float) -> None:
    await asyncio.sleep(0)


class ScriptedNames:
    """Answers the lookups in turn; the last answer stays."""

    def __init__(self, *answers: Iterable[str] | OSError) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, name: str, port: int) -> Iterable[str]:
        self.asked.append((name, port))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, OSError):
            raise answer
        return answer


async def take(sets: AsyncIterator[frozenset[str]], count: int) -> list[set[str]]:
    return [set(await anext(sets)) for _ in range(count)]


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("127.0.0.1:50061", StaticPlaces(frozenset({"127.0.0.1:50061"}))),
        ("a:1, b.example:2", StaticPlaces(frozenset({"a:1", "b.example:2"}))),
        ("a:1,a:1", StaticPlaces(frozenset({"a:1"}))),
        ("[::1]:50061", StaticPlaces(frozenset({"[::1]:50061"}))),
        ("dns:workers.serving.svc:50061", DnsName("workers.serving.svc", 50061)),
        ("dns:50061", StaticPlaces(frozenset({"dns:50061"}))),
        ("file:/etc/workers", AddressFile(Path("/etc/workers"))),
    ],
)
def test_an_address_is_a_list_a_name_or_a_file(text: str, places: Places) -> None:
    assert parse_address(text) == places


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' has no port"),
        ("worker", "'worker' has no port"),
        (":50061", "':50061' has no host"),
        ("a:1,", "'' has no port"),
        ("a b:1", "'a b:1' has no host"),
        ("http://a:1", "'http://a:1' has several colons"),
        ("a:", r"'a:' has no port in \[1, 65535\]"),
        ("a:0", r"'a:0' has no port in \[1, 65535\]"),
        ("a:65536", r"'a:65536' has no port in \[1, 65535\]"),
        ("a:port", r"'a:port' has no port in \[1, 65535\]"),
        ("::1:50061", r"an IPv6 address needs brackets, such as \[::1\]:50061"),
        ("[a]:50061", "'a' is no IPv6 address"),
        ("dns:name:", r"'name:' has no port in \[1, 65535\]"),
        ("dns:///name:1", "'///name:1' has no host"),
        ("file:", "names no file"),
    ],
)
def test_what_is_no_address_is_refused_with_the_forms_there_are(text: str, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message) as refused:
        parse_address(text)

    assert "give host:port, several with commas between, dns:name:port, or file:path" in str(refused.value)


async def test_a_list_is_told_once() -> None:
    told = [addresses async for addresses in StaticAddresses(["a:1", "b:1"]).watch()]

    assert told == [{"a:1", "b:1"}]


async def test_a_name_is_resolved_again_and_only_changes_are_told() -> None:
    names = ScriptedNames(["10.0.0.1:5", "10.0.0.2:5"], ["10.0.0.2:5", "10.0.0.1:5"], ["10.0.0.2:5"])

    told = await take(DnsAddresses("workers", 5, 2.0, names, no_wait).watch(), 2)

    assert told == [{"10.0.0.1:5", "10.0.0.2:5"}, {"10.0.0.2:5"}]
    assert names.asked == [("workers", 5)] * 3


async def test_it_waits_as_long_as_it_was_told_between_two_lookups() -> None:
    waits: list[float] = []

    async def note(seconds: float) -> None:
        waits.append(seconds)

    await take(DnsAddresses("workers", 5, 7.5, ScriptedNames(["a:5"], ["b:5"]), note).watch(), 2)

    assert waits == [7.5]


async def test_a_failed_lookup_keeps_the_last_set_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    gone = OSError("Name or service not known")
    names = ScriptedNames(gone, gone, ["a:5"], gone, gone, ["a:5"], ["b:5"])

    with caplog.at_level(logging.WARNING):
        told = await take(DnsAddresses("workers", 5, 2.0, names, no_wait).watch(), 2)

    assert told == [{"a:5"}, {"b:5"}]
    assert [vars(record)["why"] for record in caplog.records] == ["Name or service not known"] * 2


async def test_the_system_resolves_numbers_of_both_kinds() -> None:
    assert await resolve("127.0.0.1", 5) == ("127.0.0.1:5",)
    assert await resolve("::1", 5) == ("[::1]:5",)


async def test_a_file_has_one_address_a_line_and_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    path.write_text("# the first rack\n10.0.0.1:5\n\n  [::1]:5  \n")

    async def change(seconds: float) -> None:
        path.write_text("10.0.0.1:5\n")

    told = await take(FileAddresses(path, 2.0, sleep=change).watch(), 2)

    assert told == [{"10.0.0.1:5", "[::1]:5"}, {"10.0.0.1:5"}]


async def test_a_file_that_is_missing_or_damaged_keeps_the_last_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "workers"
    contents = ["10.0.0.1:5", "10.0.0.1", "10.0.0.2:5"]

    async def change(seconds: float) -> None:
        path.write_text(contents.pop(0))

    with caplog.at_level(logging.WARNING):
        told = await take(FileAddresses(path, 2.0, sleep=change).watch(), 2)

    assert told == [{"10.0.0.1:5"}, {"10.0.0.2:5"}]
    assert "No such file" in vars(caplog.records[0])["why"]
    assert "'10.0.0.1' has no port" in vars(caplog.records[1])["why"]


async def test_a_file_that_is_empty_while_it_is_written_keeps_the_last_set(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    path.write_text("10.0.0.1:5")
    contents = ["", "10.0.0.1:5", "# none yet\n", "10.0.0.2:5"]

    async def change(seconds: float) -> None:
        path.write_text(contents.pop(0))

    told = await take(FileAddresses(path, 2.0, sleep=change).watch(), 2)

    assert told == [{"10.0.0.1:5"}, {"10.0.0.2:5"}]
    assert contents == []


async def test_an_answer_without_addresses_is_believed_when_it_comes_twice_in_a_row() -> None:
    gone = OSError("Name or service not known")
    names = ScriptedNames(["a:5"], [], gone, [], ["a:5"], [], [], [], [], ["b:5"])

    told = await take(DnsAddresses("workers", 5, 2.0, names, no_wait).watch(), 3)

    assert told == [{"a:5"}, set(), {"b:5"}]
    assert len(names.asked) == 10


async def test_whoever_asks_is_told_why_there_is_no_address(tmp_path: Path) -> None:
    path, told = tmp_path / "workers", list[str]()

    async def change(seconds: float) -> None:
        path.write_text("10.0.0.1:5\n")

    await take(FileAddresses(path, 2.0, sleep=change, on_failure=told.append).watch(), 1)

    assert told == [f"file:{path} cannot be looked up: [Errno 2] No such file or directory: '{path}'"]


async def test_the_configured_address_decides_what_is_watched(tmp_path: Path) -> None:
    (tmp_path / "workers").write_text("10.0.0.1:5")

    told = [
        await take(discovery_of(text, 2.0).watch(), 1)
        for text in ("a:1,b:2", "dns:127.0.0.1:5", f"file:{tmp_path / 'workers'}")
    ]

    assert told == [[{"a:1", "b:2"}], [{"127.0.0.1:5"}], [{"10.0.0.1:5"}]]
