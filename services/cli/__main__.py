"""``epdserve``: the command line of the project.

Each command imports its code when it runs: ``--version``, ``--help`` and ``chat`` never load torch.
"""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from epdserve.services.cli import role_commands
from epdserve.services.cli.checks import REINSTALL
from epdserve.services.cli.errors import CommandError

DEFAULT_URL = "http://127.0.0.1:8000"
STATE_DIR = Path(".run")
DEMO_MODEL_DIR = Path(".demo-model")

app = typer.Typer(
    name="epdserve",
    help="Disaggregated encode / prefill / decode inference server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point: runs one command; a CommandError becomes one line on stderr and exit status 1.

    So does a package that is not installed. A module of ours that is missing is a bug, and is shown as one.
    """
    try:
        app()
    except CommandError as error:
        print(f"epdserve: {error}", file=sys.stderr)
        sys.exit(1)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("epdserve"):
            raise
        print(f"epdserve: the package {error.name} is not installed; {REINSTALL}", file=sys.stderr)
        sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"epdserve {version('epdserve')}")
        raise typer.Exit


VersionOption = Annotated[
    bool,
    typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
]


@app.callback()
def _root(show_version: VersionOption = False) -> None:
    pass


@app.command()
def up(
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one. [default: 8000]"),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Checkpoint in the official format. [default: a demo model, written once]"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file; deploy/configs/dev.toml shows every key.")
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="Folder for logs and state. [default: .run/PORT]")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Print the resolved settings and start nothing.")
    ] = False,
) -> None:
    """Start a whole server on this machine; Ctrl-C stops it."""
    from epdserve.services.cli import up as command

    command.run(command.UpOptions(port, model, config, state_dir, DEMO_MODEL_DIR, check))


@app.command()
def doctor(
    host: Annotated[str, typer.Option(help="Address that up would listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port that up would listen on.")] = 8000,
) -> None:
    """Look at this machine: what is fine, what is not, and what to do about it."""
    from epdserve.services.cli import doctor as command

    raise typer.Exit(command.run(folder=STATE_DIR, host=host, port=port))


@app.command()
def bundle(
    state_dir: Annotated[Path, typer.Option(help="Folder of the server's state.")] = STATE_DIR / "8000",
    out: Annotated[Path, typer.Option(help="Archive to write.")] = Path("epdserve-bundle.tar.gz"),
    config: Annotated[Path | None, typer.Option(help="TOML file to put in as well.")] = None,
    secret_file: Annotated[
        list[Path] | None, typer.Option(help="File whose contents must not be in it; may be repeated.")
    ] = None,
) -> None:
    """Collect versions, settings, metrics and logs for somebody who helps, without keys and tokens."""
    from epdserve.services.cli import bundle as command

    names = command.run(command.BundleOptions(state_dir, out, config, tuple(secret_file or ())))
    print(f"{out}: {len(names)} files, secrets removed; look through it before you send it")


@app.command("demo-model")
def demo_model(
    directory: Annotated[Path, typer.Argument(help="Folder to write; made if absent.")],
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Weights that know nothing, for tests of speed.")
    ] = False,
) -> None:
    """Write a small checkpoint in the official format: every mechanism alive."""
    from epdserve.services.cli import demo_model as command

    command.run(directory, random_weights=random_weights)


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="What to ask, unless --requests does.")] = None,
    model: Annotated[Path, typer.Option(help="Checkpoint in the official format.")] = DEMO_MODEL_DIR,
    requests: Annotated[
        Path | None, typer.Option(help="JSON list of chat requests, answered together.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of the answer.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Repeats a draw.")] = None,
    effort: Annotated[str | None, typer.Option(help="low, high, max or 1 to 100.")] = None,
    thinking: Annotated[bool, typer.Option(help="Let the model reason before it answers.")] = True,
    threads: Annotated[int, typer.Option(min=1, help="Of the arithmetic library.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Ask so often; later rounds hit the prefix cache.")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, with the time of each token.")
    ] = False,
) -> None:
    """Answer in this process, without a server."""
    from epdserve.services.cli import generate as command
    from epdserve.services.cli.chat import parse_effort

    if (prompt is None) == (requests is None):
        raise CommandError("give either a prompt or --requests FILE")
    if requests is not None:
        bodies = command.read_bodies(requests)
    else:
        body: dict[str, object] = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "reasoning_effort": parse_effort(effort) if effort else None,
            "thinking": {"type": "enabled" if thinking else "disabled"},
        }
        bodies = [{name: value for name, value in body.items() if value is not None}]
    command.run(model, bodies, threads=threads, rounds=rounds, as_json=as_json)


@app.command()
def logits(
    model_dir: Annotated[Path, typer.Argument(help="Checkpoint in the official format.")],
    ids: Annotated[Path, typer.Option(help="JSON list of token ids.")],
    out: Annotated[Path, typer.Option(help="File to write: array logits [T, vocabulary] float32.")],
    precision: Annotated[str, typer.Option(help="f32, f32q, bf16q or native.")] = "f32q",
    prefill: Annotated[
        int | None, typer.Option(help="Prompt length; single steps run the rest. All ids if not given.")
    ] = None,
    chunk: Annotated[
        int | None, typer.Option(help="Rows of one prefill step; the whole prompt if not given.")
    ] = None,
    encoder_hit: Annotated[
        int, typer.Option(help="Tokens found in the prefix cache, with encoder replay; even.")
    ] = 0,
    decoder_replay: Annotated[
        bool, typer.Option(help="Upper layers run on the prompt's last window only.")
    ] = False,
) -> None:
    """Write the logits after each of the given token ids, through the code that serves."""
    from epdserve.services.cli import logits as command

    options = command.LogitsOptions(precision, prefill, chunk, encoder_hit, decoder_replay)
    command.run(model_dir, ids, out, options)


@app.command()
def simulate(
    scenario: Annotated[Path, typer.Argument(help="TOML file; loadtest/README.md shows every key.")],
    compare: Annotated[
        Path | None, typer.Option(help="Another one: both are simulated, and told apart seed by seed.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="HTML page to write, with plots.")] = None,
) -> None:
    """Simulate a cluster under load: goodput, latencies, hits, shares, efforts; how many workers it takes."""
    from epdserve.services.cli import simulate as command

    command.run(command.SimulateOptions(scenario, compare, out))


@app.command()
def chat(
    message: Annotated[
        str | None, typer.Argument(help="Ask this one thing and leave; else talk, or read standard input.")
    ] = None,
    url: Annotated[
        str, typer.Option(help="Base address of the server.", envvar="EPDSERVE_URL")
    ] = DEFAULT_URL,
    model: Annotated[
        str | None, typer.Option(help="Model name; the server's first one if not given.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Bearer token.", envvar="EPDSERVE_API_KEY")] = None,
    effort: Annotated[str | None, typer.Option(help="low, high, max or 1 to 100.")] = None,
    thinking: Annotated[bool, typer.Option(help="Let the model reason before it answers.")] = True,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    tools: Annotated[
        Path | None, typer.Option(help="JSON list of functions to declare; you type their results.")
    ] = None,
) -> None:
    """Chat with a running server: streaming, reasoning set apart, a receipt after each answer."""
    from epdserve.services.cli import chat as command
    from epdserve.services.cli.chat_tools import read_tools

    options = command.ChatOptions(
        url=url,
        model=model,
        api_key=api_key,
        effort=command.parse_effort(effort) if effort else None,
        thinking=thinking,
        temperature=temperature,
        max_tokens=max_tokens,
        system=system,
        tools=read_tools(tools) if tools else [],
    )
    command.run(options, message)


role_commands.add_to(app)


if __name__ == "__main__":
    main()
