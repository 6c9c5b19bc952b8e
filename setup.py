"""Let `pip` and older tools build the project. In: nothing. Out: the package that pyproject.toml describes, which holds every setting."""

from setuptools import setup

setup()
