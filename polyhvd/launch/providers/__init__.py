"""Where jobs come from: a file for each way in which ranks are started.

Empty, since launcher and ranks need different ones: :mod:`polyhvd.launch.providers.precedence` has those that
ranks import; only the launcher uses what starts ranks, from :mod:`polyhvd.launch.providers.starting` on.
"""
