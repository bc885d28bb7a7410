"""How a program starts: its imports take seconds, and meanwhile it has nothing to lose."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


def end_at_interrupt() -> None:
    """Until the program catches signals itself, Ctrl-C ends it at once and without a traceback. A program that a shell
    started in the background goes on to ignore it."""
    if _python_handles_it():
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _python_handles_it() -> bool:
    """And can be told otherwise: signals are the main thread's."""
    return (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )


@contextlib.contextmanager
def loading(program: str, *, extra: str) -> Iterator[None]:
    """Around the imports of `program`: Ctrl-C ends it, and a package that is missing is one line, which says what to
    install."""
    handled = _python_handles_it()
    end_at_interrupt()
    try:
        yield
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] == "kvstore":
            raise
        raise SystemExit(f"{program} needs {missing.name}: pip install 'attnstore[{extra}]'") from None
    finally:
        if handled:
            signal.signal(signal.SIGINT, signal.default_int_handler)
