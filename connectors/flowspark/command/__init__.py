"""The ``flow`` command: looking at state from a shell.

- ``contract``: what a command is; packages above this one add theirs by an entry point;
- ``main``, ``arguments``, ``completion``: from the shell to a command, and its exit code;
- ``terminal``, ``words``: what a person sees;
- ``locations``, ``loads``, ``entries``: finding operators, weighing key groups, reading values;
- ``inspecting``, ``showing``, ``verifying``, ``rescaling``, ``diffing``, ``sweeping``,
  ``reporting`` (with ``page`` and ``charts``), ``doctor`` (with ``pythons``, ``probes``): one
  command each.

Nothing here imports pyspark, because state can be looked at where there is no Spark.
"""
