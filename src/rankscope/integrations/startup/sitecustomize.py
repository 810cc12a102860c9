"""Runs at the start of every Python process of a job that ``rankscope run`` started.

Python imports a module of this name by itself. It waits for torch to be imported and does nothing
before; it is written so that any Python can read it, also one without rankscope.
"""

import sys


class _TorchFinder(object):  # noqa: UP004
    """Finds no module; prepares rankscope when ``torch`` is about to be imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):  # type: ignore
        if name == "torch":
            sys.meta_path.remove(_TorchFinder)
            try:
                from rankscope.integrations.catch import prepare

                prepare()
            except Exception:  # another environment, without rankscope
                pass


def _start():  # type: ignore
    import os

    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != here]  # noqa: PTH100
    if "RANKSCOPE_RUN" not in os.environ:
        return
    sys.meta_path.insert(0, _TorchFinder)
    if os.environ.get("RANKSCOPE_RUN_PID") == str(os.getpid()):
        import atexit

        atexit.register(_report)


def _report():  # type: ignore
    try:
        from rankscope.integrations.catch import report_if_nothing_was_watched

        report_if_nothing_was_watched()
    except Exception:
        pass


def _run_the_users():  # type: ignore
    """Run the ``sitecustomize`` that Python would have found without this one."""
    try:  # the import statement's own modules: nothing has to be loaded for it
        from _frozen_importlib import module_from_spec
        from _frozen_importlib_external import PathFinder
    except ImportError:
        return
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_start()  # type: ignore
_run_the_users()  # type: ignore
