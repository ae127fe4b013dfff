"""Integrations: what connects memfine_fx to the trainers around it.

In: a trainer's own objects. Out: what that trainer expects of an extension, e.g. a callback that logs scalars.
Each module needs the package that it is named after and is imported only by who uses it. It goes through the api, as
a user would, so nothing of memfine_fx knows a trainer.
"""
