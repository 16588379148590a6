"""The keyed operator: state per key inside a query, with checkpoints that restore at any scale.

- ``stream``, ``schemas``: what a program calls, and the plan;
- ``routing``, ``ticks``, ``watermarks``: what travels with the rows, and control rows;
- ``task``: one subtask in one batch, from its base to its part;
- ``row_work``, ``arrow_work``, ``aggregation``, ``running``: the functions that it runs;
- ``parts``, ``lineage``, ``sealing``: what subtasks write, and how it becomes a checkpoint.
"""
