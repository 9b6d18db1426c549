"""JupyterHub for a class on one server: docs/class_server.md says how to install it.

    sudo .hub/bin/jupyterhub -f configs/hub/jupyterhub_config.py

Learners are users of this system, in the group `class`. The Jupyter server of each runs as that user, on a clone of
this repository in the home folder; the environments (.venv, .eras) stay the teacher's, read-only for learners.
"""

import os
import pathlib
import sys

c = get_config()  # noqa: F821
ROOT = pathlib.Path(__file__).resolve().parents[2]
HUB = ROOT / ".hub"
STATE = HUB / "state"  # the database and the secrets of the hub, closed to learners
STATE.mkdir(mode=0o700, exist_ok=True)
MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30  # GiB

# Only the proxy is reached by other machines, and only by HTTPS. Without a certificate no other machine reaches it.
certificate = os.environ.get("FAILURELAB_CERT", "")
port = os.environ.get("FAILURELAB_HUB_PORT", "8000")
c.JupyterHub.bind_url = f"https://:{port}" if certificate else f"http://127.0.0.1:{port}"
c.JupyterHub.ssl_cert, c.JupyterHub.ssl_key = certificate, os.environ.get("FAILURELAB_KEY", "")
c.JupyterHub.db_url = f"sqlite:///{STATE}/jupyterhub.sqlite"
c.JupyterHub.cookie_secret_file = f"{STATE}/cookie_secret"
c.ConfigurableHTTPProxy.pid_file = f"{STATE}/proxy.pid"
os.environ["PATH"] = f"{HUB}/bin:{os.environ['PATH']}"  # the proxy, and node for it
c.JupyterHub.cleanup_servers = True  # when the hub ends, every seat ends
c.JupyterHub.active_server_limit = max(int((MEMORY - 1.1) / 1.4), 1)  # 1.4 GiB a seat, 1.1 for the system
c.JupyterHub.authenticator_class = "pam"
c.PAMAuthenticator.allowed_groups = {"class"}

# A seat: nbgitpuller clones the course, or adds what is new and keeps what the learner changed. prlimit bounds the data
# of each process (6 GiB), and choom has the kernel end a seat before the hub when memory runs out.
start = f"""
cd && {HUB}/bin/gitpuller file://{ROOT} "" {ROOT.name}
cd {ROOT.name} && ln -sfn -t . {ROOT}/.venv {ROOT}/.eras || exit 1
export FAILURELAB_ROOT=$PWD JUPYTER_RUNTIME_DIR=$HOME/.jupyter-run
exec prlimit --data={6 * 2**30} choom -n 500 -- {HUB}/bin/jupyterhub-singleuser "$@"
"""
c.Spawner.cmd = ["bash", "-c", start, "seat"]
c.Spawner.args = ["--KernelManager.transport=ipc"]  # sockets of the learner's own: any user could read from a port
c.Spawner.default_url = "/lab/tree/notebooks/00_start_here.ipynb"
c.Spawner.start_timeout = c.Spawner.http_timeout = 300  # seconds: a cold disk, and a whole room at once
c.Spawner.environment = {"PATH": f"{ROOT}/.venv/bin:/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

# A server that nobody has used for an hour is ended.
culler = [sys.executable, "-m", "jupyterhub_idle_culler", "--timeout=3600"]
scopes = ["list:users", "read:users:activity", "read:servers", "delete:servers"]
c.JupyterHub.services = [{"name": "idle-culler", "command": culler}]
c.JupyterHub.load_roles = [{"name": "idle-culler", "scopes": scopes, "services": ["idle-culler"]}]
