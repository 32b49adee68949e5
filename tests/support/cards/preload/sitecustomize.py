"""With this folder in PYTHONPATH and AUTODS_TEST_CARDS set, the ranks of autods run on simulated cards."""

import importlib.machinery
import os
import sys


class _After:
    """A finder that runs a function of `hooks` after a module of autods was imported."""

    def __init__(self, **hooks):
        self.hooks = {name.replace("__", "."): hook for name, hook in hooks.items()}

    def find_spec(self, name, path=None, target=None):
        hook = self.hooks.get(name)
        if hook is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            from tests.support.cards import hooks

            getattr(hooks, hook)(module)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("AUTODS_TEST_CARDS"):
    sys.meta_path.insert(
        0,
        _After(
            autods__devices__cuda="claim_cuda_build",
            autods__rank__preload="preload_on_a_card",
            autods__rank__worker="run_ranks_on_a_card",
            autods__rank__shared_build="build_for_ranks_on_a_card",
        ),
    )
