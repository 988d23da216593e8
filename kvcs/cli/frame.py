"""What all commands share: options, logging, and running asynchronous ones."""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Concatenate

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
    anyway.

    Args:
        app: where the command is registered.
        name: what a user types.
        context_settings: Typer's, for a command that takes words of another.
    """

    def register(body: Body) -> Callable[..., None]:
        signature = inspect.signature(body, eval_str=True)
        own = list(signature.parameters.values())[1:]

        def run(*, as_json: bool, log_level: logs.LogLevel, **arguments: Any) -> None:
            logs.configure(log_level, as_json=as_json)
            result = body(Output(as_json=as_json), **arguments)
            if inspect.iscoroutine(result):
                run_async(result)

        # Typer reads a command's options from its signature.
        parameters = [*own, *_SHARED]
        run.__dict__["__signature__"] = signature.replace(
            parameters=[p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters],
            return_annotation=None,
        )
        run.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
        run.__doc__ = body.__doc__
        return app.command(name, context_settings=context_settings)(run)

    return register


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

    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(watched())
    except asyncio.CancelledError:
        if not terminated:
            raise
        raise typer.Exit(ExitCode.TERMINATED) from None
