import importlib.metadata
import inspect
from pathlib import Path

import torchrl_asyncgrpo

project = "torchrl_asyncgrpo"
author = "The torchrl_asyncgrpo contributors"
release = importlib.metadata.version("torchrl-asyncgrpo")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "api/generated"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"{project} {release}"

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"exclude-members": "__init__, __new__"}
napoleon_numpy_docstring = False
napoleon_use_ivar = True

_GENERATED = Path(__file__).parent / "api/generated"


def _own_members(cls: type) -> list[str]:
    """What a class defines itself and documents: its torchrl base has hundreds of methods with pages of their own."""
    kinds = (property, staticmethod, classmethod)
    return [
        name
        for name, value in vars(cls).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, kinds))
        and inspect.getdoc(value)
    ]


class _Name(str):
    """A default shown by its name."""

    __repr__ = str.__str__


def _signature(cls: type) -> str:
    """The constructor's own signature, which torchrl's metaclasses hide; types are in the text of each argument."""
    signature = inspect.signature(cls.__init__)
    kept = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()][1:]
    kept = [p.replace(default=_Name(p.default.__name__)) if inspect.isfunction(p.default) else p for p in kept]
    return str(signature.replace(parameters=kept, return_annotation=inspect.Signature.empty))


def _write_reference() -> None:
    """One entry for every name in ``torchrl_asyncgrpo.__all__``, in that order."""
    entries = []
    for name in getattr(torchrl_asyncgrpo, "__all__", []):
        value = getattr(torchrl_asyncgrpo, name)
        if inspect.isclass(value):
            signature = _signature(value) if inspect.isfunction(vars(value).get("__init__")) else ""
            members = ", ".join(_own_members(value))
            entries.append(
                f".. autoclass:: {project}.{name}{signature}\n" + f"   :members: {members}\n" * bool(members)
            )
        elif callable(value):
            entries.append(f".. autofunction:: {project}.{name}\n")
        elif inspect.ismodule(value):
            entries.append(f".. automodule:: {value.__name__}\n   :members:\n")
    _GENERATED.mkdir(parents=True, exist_ok=True)
    (_GENERATED / "reference.txt").write_text("\n".join(entries), encoding="utf-8")


_write_reference()
