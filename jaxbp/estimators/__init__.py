"""Estimators for scikit-learn that learn circuits of logic gates (docs/estimators.md)."""

try:
    from jaxbp.estimators.images import LogicConvClassifier as LogicConvClassifier
    from jaxbp.estimators.tables import LogicClassifier as LogicClassifier
    from jaxbp.estimators.tables import LogicRegressor as LogicRegressor
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("optax", "sklearn"):
        raise
    raise ModuleNotFoundError(
        f"jaxbp.estimators: the module {error.name} is missing; wants scikit-learn and Optax. Run: "
        "pip install 'jaxbp[estimators]'",
        name=error.name,
    ) from error
