"""What a worker sends of a reference step, where a test makes it up."""

import numpy as np

from rankscope.evidence.reference.share import ReferenceShare


def share_of(names, terms_MPK, given_PK, **more):
    """Return the share of parameters in float32, whose gradients stay as they were reduced."""
    num, width = given_PK.shape
    told = {
        "types": ("float32",) * num,
        "elements_P": np.full(num, float(width)),
        "norms_MP": np.linalg.norm(terms_MPK.astype(float), axis=-1),
        "reduced_PK": given_PK,
        "unsteady_P": np.zeros(num),
        "replicas_PK": np.empty((0, width), np.float32),
    }
    return ReferenceShare(names=names, terms_MPK=terms_MPK, given_PK=given_PK, **{**told, **more})
