"""``fedgrove bench``: what fedgrove costs, measured in turns with the plain way to do the same.

- ``bench engine``: :mod:`.engine` (variants in turns, in one process), :mod:`.starts` (each variant
  in its own process), :mod:`.scenes` (what is trained), :mod:`.simulators` (what our engines are
  compared with).
- ``bench lockstep``: :mod:`.engine` too.
- ``bench scale``: :mod:`.scale`.
- ``bench methods``: :mod:`.methods`, :mod:`.round_profile` (what a round's time goes into).
- ``bench wire``: :mod:`.wire`.
- ``bench device``: :mod:`.device`.

:mod:`.processes` starts and watches child processes; :mod:`.report` prints the tables and writes
the HTML pages.
"""
