"""The course as files: find labs, build notebooks from their sources, run them, reuse their code, command line.

Only `reuse`, which a learner calls, is imported here: the command line starts fast, and nobody needs an author's tools
before building.
"""

from shardlab.course.exports import reuse as reuse
