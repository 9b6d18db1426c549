"""Runs in the Python that trains: `PYTHON child.py SPEC`. It takes this package along, and nothing else from beside it.

`PYTHON child.py memory` runs `failurelab.preflight.judges.memory` there in the same way.

That Python may have another failurelab, or none; what else stands in this package's folder must not be found there.
"""

import importlib.util
import json
import os
import pathlib
import sys
import threading
import time

PACKAGE = pathlib.Path(__file__).parent.parent


def main() -> None:
    """Take the package along, then run the script that SPEC names."""
    loader = importlib.util.spec_from_file_location(
        "failurelab", PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
    )
    package = importlib.util.module_from_spec(loader)
    for name in [name for name in sys.modules if name.split(".")[0] == "failurelab"]:
        del sys.modules[name]
    sys.modules["failurelab"] = package
    loader.loader.exec_module(package)
    if sys.argv[1] == "memory":
        del sys.path[0]
        from failurelab.preflight.judges import memory

        memory.main()
        return
    spec = json.loads(pathlib.Path(sys.argv[1]).read_text())
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    sys.path[0] = spec["folder"]
    from failurelab.preflight import run

    run.main(spec)


def _end_with_parent(parent: int) -> None:
    """End this process and all that it started when the command that asked for it is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, 9)


if __name__ == "__main__":
    main()
