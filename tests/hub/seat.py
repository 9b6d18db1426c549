"""A learner at a seat: logs in as a person does, opens the server, and runs a notebook in it cell by cell.

The requests are those of JupyterLab: the login form, the hub's and the server's REST interface, and the kernel's
websocket. So the notebook runs in the learner's own kernel, in the learner's own server, as the learner's own user.
"""

import json
import pathlib
import time
import uuid

import requests
import websocket

PATIENCE = 600  # seconds for one cell, or a server's start; nothing here is about speed


class SeatFailed(Exception):
    """The hub or a server said no; the text is what it said."""


class Seat:
    """One learner, logged in: `name`, `url` of her server, `seconds` that the last notebook took."""

    def __init__(self, hub: str, name: str, password: str):
        self.hub, self.name, self.seconds = hub, name, 0.0
        self.url = f"{hub}/user/{name}"
        self._web = requests.Session()
        page = self._web.get(f"{hub}/hub/login", timeout=60)
        form = {"username": name, "password": password, "_xsrf": self._web.cookies["_xsrf"]}
        page = self._web.post(f"{hub}/hub/login?next=/hub/home", data=form, timeout=60)
        if page.status_code != 200 or "/hub/login" in page.url:
            raise SeatFailed(f"{name} was not let in: status {page.status_code} at {page.url}")
        cross = {"_xsrf": self._xsrf("/hub/")}
        made = self._web.post(f"{hub}/hub/api/users/{name}/tokens", params=cross, json={}, timeout=60)
        self._key = {"Authorization": f"token {made.json()['token']}"}

    def _xsrf(self, path: str) -> str:
        return next(each.value for each in self._web.cookies if each.name == "_xsrf" and each.path == path)

    def ask(self, method: str, url: str, **more):
        """Return the answer to a request with the learner's key, as JSON.

        Raises:
            SeatFailed: the answer is an error; with what it says.
        """
        answer = requests.request(method, url, headers=self._key, timeout=PATIENCE, **more)
        if answer.status_code >= 400:
            raise SeatFailed(f"{answer.status_code}: {answer.json().get('message', answer.text)}")
        return answer.json() if answer.content else None

    def open(self) -> None:
        """Start the learner's server, and wait until it answers.

        Raises:
            SeatFailed: the hub does not give one.
        """
        self.ask("POST", f"{self.hub}/hub/api/users/{self.name}/server")
        deadline = time.monotonic() + PATIENCE
        while not self.ask("GET", f"{self.hub}/hub/api/users/{self.name}")["server"]:
            if time.monotonic() > deadline:
                raise SeatFailed(f"the server of {self.name} does not answer")
            time.sleep(0.2)

    def close(self) -> None:
        """End the learner's server."""
        self.ask("DELETE", f"{self.hub}/hub/api/users/{self.name}/server")

    def read(self, path: str) -> str:
        """Return a file of the learner's folder, as JupyterLab opens it."""
        content = self.ask("GET", f"{self.url}/api/contents/{path}")["content"]
        return content if isinstance(content, str) else json.dumps(content)

    def run(self, path: str) -> list[dict]:
        """Run a notebook of the learner's folder, all cells; return its code cells with their new outputs.

        A cell that raises ends the run, as *Run All* does.
        """
        cells = [each for each in json.loads(self.read(path))["cells"] if each["cell_type"] == "code"]
        began = time.monotonic()
        kernel = Kernel(self, path)
        try:
            done = []
            for cell in cells:
                cell = cell | {"outputs": kernel.run(cell["source"])}
                done.append(cell)
                if any(each["output_type"] == "error" for each in cell["outputs"]):
                    break
            return done
        finally:
            self.seconds = time.monotonic() - began
            kernel.end()


class Kernel:
    """A kernel in a learner's server, for the notebook at `path`, over its websocket."""

    def __init__(self, seat: Seat, path: str = "notebooks/scratch.ipynb", kernel: str = "python3"):
        self._seat = seat
        asked = {"path": path, "name": pathlib.Path(path).name, "type": "notebook", "kernel": {"name": kernel}}
        self._session = seat.ask("POST", f"{seat.url}/api/sessions", json=asked)
        self.id = self._session["kernel"]["id"]
        address = f"{seat.url}/api/kernels/{self.id}/channels".replace("http", "ws", 1)
        self._socket = websocket.create_connection(address, header=seat._key, timeout=PATIENCE)

    def run(self, code: str) -> list[dict]:
        """Run a cell; return its outputs as a notebook holds them. A kernel that dies is an output of type `error`."""
        wanted = uuid.uuid4().hex
        header = {"msg_id": wanted, "msg_type": "execute_request", "session": wanted, "username": "", "version": "5.3"}
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False, "stop_on_error": True}
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
        self._socket.send(json.dumps(message))
        outputs: list[dict] = []
        while True:
            said = json.loads(self._socket.recv())
            kind, content = said["msg_type"], said["content"]
            state = content.get("execution_state")
            if kind == "status" and state in ("restarting", "dead"):
                return [*outputs, {"output_type": "error", "ename": "KernelDied", "evalue": state, "traceback": []}]
            if said["parent_header"].get("msg_id") != wanted:
                continue
            if kind in ("stream", "display_data", "execute_result", "error"):
                outputs.append({"output_type": kind, **content})
            elif kind == "clear_output":
                outputs.clear()
            elif kind == "status" and state == "idle":
                return outputs

    def end(self) -> None:
        """Close the notebook and end its kernel.

        A kernel that was killed is being started again; a server asked to end it in that moment answers 500, so it is
        asked again, until the session is gone.

        Raises:
            SeatFailed: it is still there after PATIENCE seconds; with what the server said last.
        """
        self._socket.close()
        url = f"{self._seat.url}/api/sessions"
        until = time.monotonic() + PATIENCE
        while self._session["id"] in [each["id"] for each in self._seat.ask("GET", url)]:
            try:
                self._seat.ask("DELETE", f"{url}/{self._session['id']}")
            except SeatFailed:
                if time.monotonic() > until:
                    raise
                time.sleep(0.5)


def text_of(outputs: list[dict]) -> str:
    """Return what outputs say in plain text, streams joined."""
    parts = []
    for each in outputs:
        if each["output_type"] == "stream":
            parts.append("".join(each["text"]))
        elif each["output_type"] == "error":
            parts.append(f"{each['ename']}: {each['evalue']}")
        else:
            parts.append("".join(each["data"].get("text/plain", "")))
    return "".join(parts)
