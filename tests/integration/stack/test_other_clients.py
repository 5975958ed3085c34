"""Clients of other projects against real processes; ``bash deploy/clients.sh`` installs them and runs this."""

import os
import subprocess
from pathlib import Path

import pytest
from support.repository import ROOT
from support.stack import Stack

PYTHON = ".venv-clients/bin/python"
NODE = ".venv-clients/bin/node-openai"
SCRIPTS = Path(__file__).parent / "clients"


def run(stack: Stack, *command: str) -> str:
    """Run a client's script; what it says at its end."""
    # litellm would look for prices on the network first
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(
        [*command, stack.base_url, stack.model],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.needs(PYTHON)
@pytest.mark.parametrize("client", ["langchain", "litellm", "instructor"])
def test_python_clients(stack: Stack, client: str) -> None:
    assert client in run(stack, PYTHON, str(SCRIPTS / f"{client}_client.py"))


@pytest.mark.slow
@pytest.mark.needs(NODE)
def test_the_client_of_npm(stack: Stack) -> None:
    # Modules are looked for beside the script that asks for them
    script = ROOT / ".venv-clients/node_client.mjs"
    script.write_text((SCRIPTS / "node_client.mjs").read_text())
    assert "npm" in run(stack, NODE, str(script))
