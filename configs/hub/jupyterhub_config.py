"""JupyterHub for a class on one server; docs/class_server.md tells how to use it.

    sudo .hub/bin/jupyterhub -f configs/hub/jupyterhub_config.py

Learners are users of this system, in the group `class`. Each gets a Jupyter server of her own that runs as her, and in
her home folder a copy of the notebooks and labs; the environments (.venv, .eras) stay the teacher's, read-only for all.
What may be set is read from the environment, so that this file is the same in every class:

    FAILURELAB_SEATS        how many seats may be open; without it as many as fit the memory
    FAILURELAB_SEAT_MIB     memory that a seat takes; without it what was measured (evidence/cpu.json)
    FAILURELAB_LIMIT_MIB    the most that one process of a seat may hold
    FAILURELAB_HUB_PORT     where the class is reached; the two ports after it are the proxy's and the hub's own
    FAILURELAB_SEAT_PORTS   of the seats' servers, on this machine only, as FIRST-LAST
    FAILURELAB_CERT, FAILURELAB_KEY   for HTTPS; without them the class is reached from this machine only
    FAILURELAB_HUB_STATE    where the hub keeps its database and secrets
    FAILURELAB_HUB_RUN      where the seats' sockets are
"""

import asyncio
import os
import pathlib
import pwd
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "helpers"))
from failurelab_course.teaching import seat_home, seats  # noqa: E402

c = get_config()  # noqa: F821

HUB = ROOT / ".hub"
RUN = pathlib.Path(os.environ.get("FAILURELAB_HUB_RUN") or "/run/failurelab")
STATE = pathlib.Path(os.environ.get("FAILURELAB_HUB_STATE") or HUB / "state")


def given(name: str, default: str, form: str = r"[1-9]\d*") -> str:
    """Return a variable of the environment.

    Raises:
        SeatError: it is not of that form.
    """
    value = os.environ.get(name) or default
    if value and not re.fullmatch(form, value):
        raise seats.SeatError(f"{name} is {value!r}. Next: see {pathlib.Path(__file__).name}, which tells its form")
    return value


def plan() -> tuple[seats.Need, int]:
    """Return a seat's need and the number of seats; look first at what would stop the class in its midst."""
    per_seat = given("FAILURELAB_SEAT_MIB", "")
    need = seats.Need(own=int(per_seat) * seats.MIB, shared=0) if per_seat else seats.measured()
    free = seats.available()
    wanted = int(given("FAILURELAB_SEATS", "") or max(seats.fit(free, need), 1))
    seats.check(wanted, free, need)
    for port, what in ((PORT, "the class"), (PORT + 1, "the proxy's own interface"), (PORT + 2, "the hub")):
        seats.check_port(port, what)
    seats.check_reach([ROOT, pathlib.Path(sys.executable), ROOT / ".venv" / "bin" / "python"])
    return need, wanted


try:
    PORT = int(given("FAILURELAB_HUB_PORT", "8000"))
    FIRST, LAST = map(int, given("FAILURELAB_SEAT_PORTS", "20000-20999", r"\d+-\d+").split("-"))
    if FIRST > LAST:
        raise seats.SeatError(f"FAILURELAB_SEAT_PORTS is '{FIRST}-{LAST}', an empty range. Next: FIRST-LAST")
    # Three times what the largest process of a seat with notebook 01 holds.
    LIMIT = int(given("FAILURELAB_LIMIT_MIB", "6144")) * seats.MIB
    certificate, key = os.environ.get("FAILURELAB_CERT"), os.environ.get("FAILURELAB_KEY")
    if bool(certificate) != bool(key):
        raise seats.SeatError("FAILURELAB_CERT and FAILURELAB_KEY go together for HTTPS. Next: set both, or none")
    NEED, SEATS = plan()
    STATE.mkdir(mode=0o700, parents=True, exist_ok=True)
except (seats.SeatError, OSError) as error:
    raise SystemExit(f"ERROR {error}") from None


# The hub. It is the only program that other machines reach, and only by HTTPS.
if certificate and key:
    c.JupyterHub.bind_url = f"https://:{PORT}"
    c.JupyterHub.ssl_cert, c.JupyterHub.ssl_key = certificate, key
else:
    c.JupyterHub.bind_url = f"http://127.0.0.1:{PORT}"
c.ConfigurableHTTPProxy.api_url = f"http://127.0.0.1:{PORT + 1}"
c.JupyterHub.hub_bind_url = f"http://127.0.0.1:{PORT + 2}"
c.ConfigurableHTTPProxy.command = [
    str(HUB / "bin" / "node"),
    str(HUB / "node_modules" / "configurable-http-proxy" / "bin" / "configurable-http-proxy"),
]
c.ConfigurableHTTPProxy.pid_file = str(STATE / "proxy.pid")
c.JupyterHub.db_url = f"sqlite:///{STATE / 'jupyterhub.sqlite'}"
c.JupyterHub.cookie_secret_file = str(STATE / "cookie_secret")
c.JupyterHub.cleanup_servers = True  # with the hub every seat ends
c.JupyterHub.active_server_limit = SEATS
# A room that starts at once waits in one queue, the processors'; a limit here would turn learners away with an error.
c.JupyterHub.concurrent_spawn_limit = SEATS

# Who: users of this system, by their passwords.
c.JupyterHub.authenticator_class = "pam"
c.PAMAuthenticator.allowed_groups = {"class"}

# A seat: a server as that user. util-linux's tools bound it: LocalProcessSpawner itself has no limits.
c.JupyterHub.spawner_class = "jupyterhub.spawner.LocalProcessSpawner"
c.Spawner.ip = "127.0.0.1"
# Each process of a seat has a limit, and is ended before the hub where the machine itself runs out of memory.
c.Spawner.cmd = ["prlimit", f"--data={LIMIT}", "choom", "-n", "500", "--", str(HUB / "bin" / "jupyterhub-singleuser")]
c.Spawner.args = [
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    "--LabApp.extension_manager=readonly",
    # Sockets that only the learner can open. By ports, any user of this machine could read what a cell prints.
    "--KernelManager.transport=ipc",
]
c.Spawner.notebook_dir = f"~/{seat_home.FOLDER}"
c.Spawner.default_url = "/lab/tree/notebooks/00_start_here.ipynb"
c.Spawner.start_timeout = c.Spawner.http_timeout = 300  # a cold disk, and a whole room at once
c.Spawner.env_keep = ["LANG", "LC_ALL"]


def own_folder(spawner) -> str:
    """Return the learner's copy of the course."""
    return str(pathlib.Path(pwd.getpwnam(spawner.user.name).pw_dir) / seat_home.FOLDER)


def sockets(spawner) -> str:
    """Return the folder of a seat's sockets: not in the home folder, for their paths have at most 107 characters."""
    return str(RUN / str(pwd.getpwnam(spawner.user.name).pw_uid))


c.Spawner.environment = {
    "JUPYTER_RUNTIME_DIR": sockets,
    "FAILURELAB_ROOT": own_folder,
    "FAILURELAB_SEAT_LIMIT": str(LIMIT),
    "JUPYTER_PATH": str(HUB / "course"),  # the course's kernels
    "PATH": f"{ROOT / '.venv' / 'bin'}:/usr/local/bin:/usr/bin:/bin",  # `failurelab` in a terminal
    "OMP_NUM_THREADS": "1",  # as fast for small models, and seats do not slow each other down more than they must
    "HF_HUB_OFFLINE": "1",
}

given_ports: dict[str, int] = {}


async def before(spawner) -> None:
    """Give a seat its port and the learner her copy of the course; or tell her why not."""
    name = spawner.user.name
    try:
        seats.check_one_more(seats.available(), NEED)
        others = [port for user, port in given_ports.items() if user != name]
        spawner.port = given_ports[name] = seats.free_port(range(FIRST, LAST + 1), others)
        make_private(pathlib.Path(sockets(spawner)), pwd.getpwnam(name))
        await asyncio.to_thread(prepare, name)
    except seats.SeatError as error:
        given_ports.pop(name, None)
        error.jupyterhub_message = str(error)  # shown on the page
        raise


def after(spawner) -> None:
    """Take the seat's port back."""
    given_ports.pop(spawner.user.name, None)


def make_private(folder: pathlib.Path, user: pwd.struct_passwd) -> None:
    """Make a folder that is the user's alone, in one where nobody but the hub can make or replace any."""
    RUN.mkdir(mode=0o755, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if os.geteuid() == 0:
        os.chown(folder, user.pw_uid, user.pw_gid)


def prepare(name: str) -> None:
    """Make the learner's copy in a process of hers: what root writes into a home folder, a link there leads astray."""
    user = pwd.getpwnam(name)
    own = {"HOME": user.pw_dir, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "helpers")}
    as_user = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if os.geteuid() == 0 else {}
    command = [sys.executable, "-m", "failurelab_course.teaching.seat_home", str(ROOT), user.pw_dir]
    done = subprocess.run(command, env=own, cwd="/", capture_output=True, text=True, umask=0o077, **as_user)
    if done.returncode:
        raise seats.SeatError((done.stderr.strip().splitlines() or ["the learner's copy cannot be made"])[-1])


c.Spawner.pre_spawn_hook = before
c.Spawner.post_stop_hook = after

# A seat that nobody has used for an hour gives its memory back; what is saved stays.
c.JupyterHub.load_roles = [
    {
        "name": "idle-culler",
        "scopes": ["list:users", "read:users:activity", "read:servers", "delete:servers"],
        "services": ["idle-culler"],
    }
]
c.JupyterHub.services = [
    {"name": "idle-culler", "command": [sys.executable, "-m", "jupyterhub_idle_culler", "--timeout=3600"]}
]
