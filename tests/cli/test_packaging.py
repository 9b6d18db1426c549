"""Packaging: one list of the course's packages, floors that import downward, and a core that needs nothing else."""

import ast
import os
import re
import subprocess
import sys
import tomllib

import pytest

from failurelab import eras

ROOT = eras.root()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE = ROOT / "helpers" / "failurelab"
FLOORS = [
    "expect observe noise registry models task hub shapes tiers families predicates tables figures",
    "gradients adapters handles decoding rollouts logits alignment chunked tied guards guard_base logits_guard "
    "trainers arithmetic judge patched zero3 engines engine_build engine_guard measure measure_trainer measure_loop "
    "measure_engine measure_logits measure_log_probs placement placement_faults device_maps precision native "
    "placement_guard simulate simulated_memory budget simulated_kernels simulated_bits simulated_node "
    "measure_placement measure_launch measure_node",
    "eras era_install installers wheels own_torch era_links magics era_client era_kernel era_output live "
    "lab_remote notebook learners check_server check_process check_client state_file predictions predict_view "
    "predict",
    "labs lab_files course ran_on contract stored runner supervise results junit symptoms recording doctor "
    "exposure evidence ledger_tables ledger_format ledger_training ledger_machines ledger_memory "
    "ledger_together ledger_pictures ledger_compare lab_state lab_work lab_report pack pack_wheels "
    "bundle_installer not_run ledger_offline ledger_times seats seat_home ledger_class slides slide_rules slide_text",
    "cli lab_cli __main__",
]
FLOORS = [set(line.split()) for line in FLOORS]
CORE = sorted(FLOORS[0] | FLOORS[1])


def asked_for(name):
    """Return the names of the packages that eras/NAME.in asks for."""
    lines = (ROOT / "eras" / f"{name}.in").read_text().splitlines()
    return {re.split(r"[=<>~]", line)[0] for line in lines if line and not line.startswith("#")}


def test_the_extra_and_the_era_today_name_the_same_packages():
    """`pip install failurelab[course]` and `make` must not drift apart."""
    assert asked_for("today") - {"setuptools", "wheel"} == set(
        PROJECT["project"]["optional-dependencies"]["course"]
    ) - {"torch"} | {"transformers"}


def test_environment_yml_installs_the_lock_and_the_same_torch():
    """Conda and Binder get what `make` gets."""
    text = (ROOT / "environment.yml").read_text()
    torch = re.search(r"torch==(\S+)", (ROOT / "eras" / "torch.txt").read_text()).group(1)
    assert f"pytorch-cpu={torch}" in text
    assert "-r eras/today.txt" in text
    assert "-e ." in text
    python = re.search(r"python=(\S+)", text).group(1)
    assert python in ("3.11", "3.12")


def test_imports_go_only_downward():
    """A module imports from its own floor or a lower one; every module has a floor."""
    floor_of = {module: number for number, modules in enumerate(FLOORS) for module in modules}
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        module = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if module == "__init__":
            continue
        assert module in floor_of, f"{module} has no floor: name one in this test and in CONTRIBUTING.md"
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom):
                dotted = (node.module or "").removeprefix("failurelab").strip(".")
                inside = node.level or (node.module or "").startswith("failurelab")
                names = (
                    [dotted.split(".")[0]]
                    if dotted and inside
                    else [alias.name for alias in node.names]
                    if inside
                    else []
                )
            elif isinstance(node, ast.Import):
                names = [alias.name.split(".")[1] for alias in node.names if alias.name.startswith("failurelab.")]
            wrong += [f"{module} imports {name}" for name in names if floor_of.get(name, 0) > floor_of[module]]
    assert wrong == []


@pytest.mark.parametrize("module", CORE)
def test_the_core_imports_torch_and_transformers_only(module):
    """What a reader takes home asks for nothing more at import; the rest is imported where it is used."""
    allowed = {"torch", "transformers", "packaging", "failurelab"} | set(sys.stdlib_module_names)
    path = PACKAGE / f"{module}.py"
    tree = ast.parse((path if path.is_file() else PACKAGE / module / "__init__.py").read_text())
    found = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.split(".")[0])
    assert found <= allowed


def test_the_core_installs_alone(tmp_path):
    """With only torch, transformers and what these bring, helpers import and the command says what it needs.

    The environment is an empty one that sees nothing of the course's but these packages, linked in one by one.
    """
    import importlib.metadata as metadata

    wanted, seen = ["torch", "transformers", "packaging"], {}
    while wanted:
        name = re.sub(r"[-_.]+", "-", wanted.pop()).lower()
        if name in seen:
            continue
        try:
            seen[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        for line in seen[name].requires or []:
            if "extra ==" not in line:
                wanted.append(re.match(r"[\w.-]+", line).group(0))
    assert not {"trl", "peft", "accelerate", "deepspeed", "bitsandbytes", "datasets"} & set(seen)
    site = tmp_path / "site"
    site.mkdir()
    for distribution in seen.values():
        for part in {str(file).split("/")[0] for file in distribution.files if ".." not in str(file)}:
            source = distribution.locate_file(part)
            if source.exists() and not (site / part).exists():
                (site / part).symlink_to(source)
    (site / "failurelab").symlink_to(PACKAGE)
    modules = ", ".join(f"failurelab.{module}" for module in CORE)
    environment = {key: value for key, value in os.environ.items() if key != "FAILURELAB_ROOT"} | {
        "PYTHONPATH": str(site)
    }
    python = [sys.executable, "-S"]
    done = subprocess.run([*python, "-c", f"import {modules}"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    command = subprocess.run([*python, "-m", "failurelab"], env=environment, capture_output=True, text=True)
    assert command.returncode == 2
    missing = [name for name in ("typer", "rich") if name not in seen]
    assert not missing or f"needs {' and '.join(missing)}" in command.stderr
