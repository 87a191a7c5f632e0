"""The class that `trust_remote_code=True` finds in a published draft. All code is in the package hf-dspark."""

try:
    import hf_dspark
except ModuleNotFoundError as error:
    if error.name != "hf_dspark":
        raise
    raise ImportError("This model is a DSpark draft, which needs a package: run `pip install hf-dspark`.") from error


class DSparkForCausalLM(hf_dspark.DSparkForCausalLM):
    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """The package's own class: a draft is the same thing however it was loaded."""
        return hf_dspark.DSparkForCausalLM.from_pretrained(*args, **kwargs)
