"""The class that `trust_remote_code=True` finds in a published draft. All code is in the package hf-dspark."""

try:
    import hf_dspark
except ModuleNotFoundError as error:
    if error.name != "hf_dspark":
        raise
    raise ImportError("This model is a DSpark draft, which needs a package: run `pip install hf-dspark`.") from error


class DSparkForCausalLM:
    """Gives the package's own class: a draft is the same thing however it was loaded. Not a model itself, because the
    Auto classes compare a model's `config_class` with the config, which is that of the target's family."""

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        return hf_dspark.DSparkForCausalLM.from_pretrained(*args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoModel"):
        """Called by the Auto classes; this file need not be copied when the draft is saved."""
