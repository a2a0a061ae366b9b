"""Parts of a run of which nothing was recorded, although they were to be; such a run is never called healthy."""

from __future__ import annotations

import time

from ampscope.analysis.overview.ranks.steps_by_rank import steps_by_rank
from ampscope.analysis.overview.ranks.world import World
from ampscope.analysis.words.rank_words import ranks_in_words
from ampscope.trace.files.folder_lock import is_locked
from ampscope.trace.files.layout import rank_folder
from ampscope.trace.files.recording_end import recording_ends
from ampscope.trace.read.run import Run


def recording_gaps(run: Run, world: World) -> tuple[str, ...]:
    """What was not recorded, in sentences, with what to do; empty where all was.

    Args:
        run: The run.
        world: Its ranks.
    """
    steps = steps_by_rank(run)
    found = []
    for rank in world.present:
        last = steps[rank].last if rank in steps else None
        whose = f" on rank {rank:,}" if world.is_shared else ""
        for end in recording_ends(rank_folder(run.path, rank)):
            since = "before the first step" if last is None else f"after step {last:,}"
            if any(segment.started > end.time for segment in run.manifest.segments):
                since = "in an earlier part of the run"
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(end.time))
            found.append(
                f"Recording ended{whose} {since}, at {at} ({end.why}): what the training did then is not known. "
                "Make room, or give dir= a folder on another disk, and watch again."
            )
    silent = [rank for rank in world.present if rank not in steps and not is_locked(rank_folder(run.path, rank))]
    if silent and len(silent) < len(world.present):
        alone = "" if len(world.present) - len(silent) > 1 else ", so nothing was compared"
        who = ranks_in_words(silent)
        found.append(
            f"{who[:1].upper()}{who[1:]} recorded no step{alone}: a process that ended right after ampscope.watch, or "
            "that never called the model. Its own output tells why."
        )
    return tuple(found)
