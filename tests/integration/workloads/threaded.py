"""Importing this starts a thread, so the zygote cannot load it and each rank imports its workload by itself."""

import threading

from tiny import build_batch, build_model

__all__ = ["build_batch", "build_model"]

threading.Thread(target=threading.Event().wait, daemon=True).start()
