"""The course as files: find labs, build notebooks from their sources, run them, reuse their code, command line.

Nothing is imported here, so that the command line starts fast and a learner needs none of an author's tools.
"""
