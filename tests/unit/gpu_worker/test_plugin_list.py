"""Which distributions a worker tells of as its plug-ins."""

from importlib.metadata import Distribution
from pathlib import Path

from gpu_worker.plugin_list import worker_plugins


def distribution(folder: Path, name: str, version: str, entry_points: str) -> Distribution:
    """A distribution as an installer leaves it: a folder of metadata."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)
    return Distribution.at(info)


def test_those_that_touch_a_worker_are_named_with_their_version_in_order(tmp_path: Path) -> None:
    installed = [
        distribution(tmp_path, "zeta", "2.0", "[dihedral.logits_processors]\nz = zeta:Z\n"),
        distribution(tmp_path, "alpha", "0.1", "[dihedral.model_loaders]\na = alpha:A\nb = alpha:B\n"),
        distribution(tmp_path, "scheduling", "1.0", "[dihedral.schedulers]\ns = scheduling:S\n"),
        distribution(tmp_path, "unrelated", "1.0", "[console_scripts]\nu = unrelated:main\n"),
    ]

    assert worker_plugins(installed) == ("alpha==0.1", "zeta==2.0")


def test_our_own_distribution_is_no_plugin(tmp_path: Path) -> None:
    installed = [distribution(tmp_path, "dihedral", "9.9", "[dihedral.workers]\nlocal = gpu_worker.worker:Worker\n")]

    assert worker_plugins(installed) == ()


def test_this_environment_is_looked_at_when_nothing_else_is_named() -> None:
    assert worker_plugins() == ()
