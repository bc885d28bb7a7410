"""The one import package is put together from four folders; the rest of packaging is in pyproject.toml."""

from setuptools import find_packages, setup

FOLDERS = {
    "kvstore": "kvstore",
    "kvstore.gpu_worker": "gpu_worker",
    "kvstore.kernels": "kernels",
    "kvstore.scheduler": "scheduler",
}

setup(
    package_dir=FOLDERS,
    packages=[
        *FOLDERS,
        *(f"{name}.{below}" for name, folder in FOLDERS.items() for below in find_packages(folder)),
    ],
)
