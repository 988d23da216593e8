"""What all commands share: options, logging, and running asynchronous ones."""

from __future__ import annotations

import asyncio
import gc
import inspect
import signal
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Concatenate, Final, get_type_hints

import typer

from kvcs.cli import logs
from kvcs.cli.failures import ExitCode
from kvcs.cli.loops import loop_factory
from kvcs.cli.output import Output
from kvcs.errors import UsageError

Body = Callable[Concatenate[Output, ...], Any]
"""What a command does; its first parameter is the `Output` to print to, the others are Typer's."""

JsonFlag = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
LevelOption = Annotated[
    logs.LogLevel,
    typer.Option("--log-level", case_sensitive=False, help="What to log on standard error."),
]

OWN_PROCESS: Final = ContextVar("own_process", default=False)
"""Whether the process is the command's alone, not that of a program that calls `kvcs.cli.main`."""

_SHARED = (
    inspect.Parameter(
        "as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=JsonFlag
    ),
    inspect.Parameter(
        "log_level",
        inspect.Parameter.KEYWORD_ONLY,
        default=logs.LogLevel.WARNING,
        annotation=LevelOption,
    ),
)


def command(
    app: typer.Typer, name: str, *, context_settings: dict[str, Any] | None = None
) -> Callable[[Body], Callable[..., None]]:
    """Make a function a command of `app`, with the options that all commands have.

    It may be ``async``: then SIGINT and SIGTERM cancel it, and its contexts end as they would
    anyway. A parameter whose annotation is a dataclass is a group of options: each field of it is
    one, and the function gets them together.

    Args:
        app: where the command is registered.
        name: what a user types.
        context_settings: Typer's, for a command that takes words of another.
    """

    def register(body: Body) -> Callable[..., None]:
        signature = inspect.signature(body, eval_str=True)
        own = list(signature.parameters.values())[1:]
        groups: dict[str, Any] = {p.name: p.annotation for p in own if is_dataclass(p.annotation)}

        def run(*, as_json: bool, log_level: logs.LogLevel, **arguments: Any) -> None:
            logs.configure(log_level, as_json=as_json)
            for name, group in groups.items():
                arguments[name] = group(**{f.name: arguments.pop(f.name) for f in fields(group)})
            result = body(Output(as_json=as_json), **arguments)
            if inspect.iscoroutine(result):
                run_async(result)

        # Typer reads a command's options from its signature.
        parameters = [*_single(own), *_SHARED]
        run.__dict__["__signature__"] = signature.replace(
            parameters=[p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters],
            return_annotation=None,
        )
        run.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
        run.__doc__ = body.__doc__
        return app.command(name, context_settings=context_settings)(run)

    return register


def _single(parameters: Iterable[inspect.Parameter]) -> Iterator[inspect.Parameter]:
    """Parameters of a function, with each option of its groups as one."""
    for parameter in parameters:
        group = parameter.annotation
        if not is_dataclass(group):
            yield parameter
            continue
        hints = get_type_hints(group, include_extras=True)
        for field in fields(group):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            yield inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=hints[field.name],
            )


def run_async(body: Coroutine[Any, Any, None]) -> None:
    """Run an asynchronous command to its end; SIGTERM cancels it as SIGINT does.

    The loop is uvloop's where that is installed; the environment variable KVCS_EVENT_LOOP may say
    ``asyncio``.

    Raises:
        UsageError: that variable asks for a loop that there is not.
        typer.Exit: the process was told to end.
        KeyboardInterrupt: SIGINT came.
    """
    terminated = False
    try:
        factory = loop_factory()
    except UsageError:
        body.close()
        raise

    async def watched() -> None:
        task = asyncio.ensure_future(body)

        def terminate() -> None:
            nonlocal terminated
            terminated = True
            task.cancel()

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, terminate)
        try:
            await task
        finally:
            loop.remove_signal_handler(signal.SIGTERM)

    if OWN_PROCESS.get():
        # What was imported stays: garbage collections that go through it each time take a
        # twentieth of a busy relay's processor time.
        gc.freeze()
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(watched())
    except asyncio.CancelledError:
        if not terminated:
            raise
        raise typer.Exit(ExitCode.TERMINATED) from None
