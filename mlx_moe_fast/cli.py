"""Commands: `mlx_moe_fast COMMAND ...`, and `mlx_moe_fast.generate` in the place of `mlx_lm.generate`.

`generate` writes nothing of its own to stdout: what is there is mlx-lm's.
"""

import argparse
import importlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from . import __version__, envs, patch, unpatch
from .errors import NotAccelerated

MODES = ("auto", "off", "require")


def generate(argv: list[str]) -> None:
    """mlx_lm.generate with fast mixture-of-experts layers; takes all its flags"""
    own = argparse.ArgumentParser("mlx_moe_fast.generate", add_help=False, allow_abbrev=False)
    _add_own_flags(own)
    options, theirs = own.parse_known_args(argv)
    mode = options.moe_fast
    if mode not in MODES:
        own.error(f"{envs.MODE.name} is {mode!r}, and must be one of {', '.join(MODES)}")

    # `import mlx_lm.generate as module` would give the function of that name.
    module = importlib.import_module("mlx_lm.generate")
    stock_load, stock_parser = module.load, module.setup_arg_parser

    def load(path: str, *args: Any, **kwargs: Any) -> tuple:
        nonlocal mode
        _check_path(path)
        loaded = stock_load(path, *args, **kwargs)
        _accelerate(loaded[0], path, mode, options.moe_fast_report)
        if mode == "require":
            mode = "auto"  # only a draft model can follow, and that may be dense
        return loaded

    def setup_arg_parser() -> argparse.ArgumentParser:
        # Shown but not added: added, our flags would make short forms of mlx-lm's, such as --mo, ambiguous.
        parser, shown = stock_parser(), stock_parser()
        shown.conflict_handler = "resolve"  # of a flag that both have, ours is the one that works
        _add_own_flags(shown)
        parser.format_help = shown.format_help
        return parser

    with (
        _log_on_stderr(),
        _replaced(sys, argv=[own.prog, *theirs]),
        _replaced(module, load=load, setup_arg_parser=setup_arg_parser),
    ):
        module.main()


def report(argv: list[str]) -> None:
    """load a model, patch it and tell which layers run fast, and why others do not"""
    parser = argparse.ArgumentParser("mlx_moe_fast report", description=report.__doc__)
    parser.add_argument("model", help="local folder or Hugging Face repo")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    _check_path(options.model)

    from mlx_lm import load  # slow to import

    with _log_on_stderr():
        model, *_ = load(options.model, lazy=True)
        found = patch(model)
    print(json.dumps(found.to_dict(), indent=2) if options.json else found)


COMMANDS: dict[str, Callable[[list[str]], int | None]] = {
    "generate": generate,
    "report": report,
}


def main() -> int | None:
    parser = argparse.ArgumentParser(
        "mlx_moe_fast",
        usage="%(prog)s COMMAND ...",
        description="\n".join(f"  {name:<10}{command.__doc__}" for name, command in COMMANDS.items()),
        epilog="`mlx_moe_fast COMMAND --help` tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=__version__)
    options = parser.parse_args(sys.argv[1:2])
    return COMMANDS[options.command](sys.argv[2:])


def generate_main() -> None:
    generate(sys.argv[1:])


def _add_own_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("mlx_moe_fast")
    group.add_argument(
        "--moe-fast",
        choices=MODES,
        default=envs.MODE.get() or envs.MODE.default,
        help="auto: stock MLX where a layer cannot run fast; off: stock MLX; require: fail unless the "
        f"model's MoE layers run fast (default: ${envs.MODE.name} or {envs.MODE.default})",
    )
    group.add_argument("--moe-fast-report", action="store_true", help="tell on stderr which layers run fast")
    group.add_argument("--version", action="version", version=f"mlx_moe_fast {__version__}")


def _accelerate(model: Any, name: str, mode: str, show_report: bool) -> None:
    if mode == "off":
        if show_report:
            _say(f"{name} is not patched: the mode is off")
        return

    try:
        found = patch(model, strict=mode == "require")
    except NotAccelerated as error:
        _fail(f"{name}: {error}")
    except Exception as error:
        if mode == "require":
            raise
        unpatch(model)
        _say(f"warning: {name} runs on stock MLX, as patching it failed: {error!r}")
        return
    if show_report or not found.replaced:
        _say(f"{name}: {found}")


def _check_path(name: str) -> None:
    """Stops at a missing folder, which mlx-lm would look up on the Hub instead."""
    looks_local = name.startswith(("/", ".", "~")) or name.endswith("/") or name.count("/") > 1
    if looks_local and not Path(name).exists():
        _fail(
            f"there is no model folder {Path(name).absolute()}\n"
            "Give a folder that has config.json and *.safetensors, or a Hugging Face repo as OWNER/NAME."
        )


def _say(text: str) -> None:
    print(f"mlx_moe_fast: {text}", file=sys.stderr)


def _fail(text: str) -> NoReturn:
    _say(f"error: {text}")
    raise SystemExit(1)


@contextmanager
def _log_on_stderr() -> Iterator[None]:
    """Shows what the package logs, such as that it compiles kernels, which takes a while the first time."""
    log, handler = logging.getLogger(__package__), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"{__package__}: %(message)s"))
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


@contextmanager
def _replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    originals = {name: getattr(owner, name) for name in attributes}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        vars(owner).update(originals)
