"""``fedgrove bench``: what fedgrove costs, measured in the same run beside the plain way.

- ``bench engine``: :mod:`.engine` (variants in turns, in one process), :mod:`.starts` (each variant
  in processes of its own, which run :mod:`.alone`), :mod:`.scenes` (what is trained),
  :mod:`.plain_loop`, :mod:`.flower` and :mod:`.pfl` (what our engines are measured beside).
- ``bench lockstep``: :mod:`.engine` too.
- ``bench scale``: :mod:`.scale`.
- ``bench methods``: :mod:`.methods`, :mod:`.where` (what a round's time goes into).
- ``bench wire``: :mod:`.wire`, :mod:`.weights` (what is sent), :mod:`.plain_codec` (the plain way).
- ``bench device``: :mod:`.device`.

:mod:`.show` prints all tables and writes the pages, but for that of ``bench engine``, which is in
:mod:`.page`.
"""
