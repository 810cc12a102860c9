"""``rankscope serve``: the live page over one or many runs."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from rankscope.cli.output import plain, terminal
from rankscope.record.stores import Store, at_hand, keep_at_hand
from rankscope.report.live import live_server


def serve(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="A run's directory, or one that holds runs and studies at any depth up to six; "
            "here or, as s3://…, in an object store.",
        ),
    ],
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="The address to listen on. Others than this machine's "
            "loopback address need a token.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, metavar="PORT", help="The port; 0 for any that is free."),
    ] = 8321,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="RANKSCOPE_TOKEN",
            metavar="TOKEN",
            help="What a viewer must know, given in the address as ?token=. Made and printed if "
            "one is needed and none is given.",
        ),
    ] = None,
    browser: Annotated[
        bool, typer.Option("--open", help="Open the page in this machine's browser.")
    ] = False,
) -> None:
    """Show runs in the browser while they are trained, and afterwards.

    The page needs no internet. From another machine, forward the port: ssh -L 8321:localhost:8321
    HOST, and open http://localhost:8321. Ctrl-C stops it. Exit code: 130 after Ctrl-C; 2 bad usage.
    """
    store = Store.of(directory)
    server = live_server(at_hand(directory), host=host, port=port, token=token)
    if store is not None:
        keep_at_hand(store)
    line = Text.assemble(
        ("rankscope: ", "bold"), plain(f"{directory} at "), (server.url, "bold cyan")
    )
    terminal().print(line, soft_wrap=True, highlight=False)
    terminal().print(Text("           Ctrl-C stops it.", style="dim"))
    server.serve_until_stopped(browser=browser)
