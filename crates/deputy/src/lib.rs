//! deputy
