//! Writes as the bodies that the API server takes. Must never leave a precondition out.
