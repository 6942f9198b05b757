"""Makes every test run the same on every machine: offline, one computing thread, no colours.

Set before anything that reads them is imported; subprocesses of tests inherit them.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["NO_COLOR"] = "1"
for name in [name for name in os.environ if name.startswith("DIHEDRAL_")]:
    del os.environ[name]  # a developer's own configuration is not the tests'
