//! Metrics that are declared once: name, type, labels and help of each are in one place, and the reference in
//! the documents is made from these declarations.
//!
//! Names follow Prometheus' rules (base units, `_total` on counters and on nothing else);
//! tests/commands/reference.rs checks them. Must never be given more or fewer label values than a metric
//! declares: the compiler counts them.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::{Metric, Unit};

pub use prometheus_client::metrics::counter::Counter;
pub use prometheus_client::metrics::gauge::Gauge;
pub use prometheus_client::metrics::histogram::Histogram;
pub use prometheus_client::registry::Registry;

/// A gauge of numbers that are not whole.
pub(crate) type FloatGauge = Gauge<f64, AtomicU64>;

/// The upper bounds of every histogram, in seconds: from a check of one object to a full round over a large
/// cluster.
const BUCKETS: [f64; 8] = [0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0];

/// One metric, as it is declared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Declaration {
    /// Its name on the page.
    pub name: &'static str,
    /// `counter`, `gauge` or `histogram`.
    pub kind: &'static str,
    /// The names of its labels.
    pub labels: &'static [&'static str],
    /// What it counts.
    pub help: &'static str,
}

/// A type of metric.
pub trait MetricKind: Metric + Clone {
    /// Its name.
    const NAME: &'static str;

    /// A metric that has counted nothing.
    fn zero() -> Self;
}

impl MetricKind for Counter {
    const NAME: &'static str = "counter";

    fn zero() -> Self {
        Self::default()
    }
}

impl MetricKind for Gauge {
    const NAME: &'static str = "gauge";

    fn zero() -> Self {
        Self::default()
    }
}

impl MetricKind for FloatGauge {
    const NAME: &'static str = "gauge";

    fn zero() -> Self {
        Self::default()
    }
}

impl MetricKind for Histogram {
    const NAME: &'static str = "histogram";

    fn zero() -> Self {
        Self::new(BUCKETS)
    }
}

type LabelSet<const N: usize> = [(&'static str, String); N];

/// A metric with labels: one of its kind per combination of their values.
#[derive(Debug, Clone)]
pub struct Labelled<M, const N: usize> {
    names: [&'static str; N],
    family: Family<LabelSet<N>, M, fn() -> M>,
}

impl<M: MetricKind, const N: usize> Labelled<M, N> {
    /// None of them has counted anything.
    pub(crate) fn new(names: [&'static str; N]) -> Self {
        Self { names, family: Family::new_with_constructor(M::zero) }
    }

    fn labels(&self, values: [&str; N]) -> LabelSet<N> {
        let mut values = values.into_iter();
        self.names.map(|name| (name, values.next().unwrap_or_default().to_owned()))
    }

    /// The one with these values.
    pub(crate) fn with(&self, values: [&str; N]) -> M {
        self.family.get_or_create(&self.labels(values)).clone()
    }

    /// Takes the one with these values off the page: what it was about is gone.
    pub(crate) fn remove(&self, values: [&str; N]) {
        self.family.remove(&self.labels(values));
    }

    /// Takes all of them off the page.
    pub(crate) fn clear(&self) {
        self.family.clear();
    }
}

impl<const N: usize> Labelled<Counter, N> {
    /// Counts one.
    pub(crate) fn inc(&self, values: [&str; N]) {
        self.with(values).inc();
    }
}

/// Something that can be put onto the page.
pub(crate) trait Registered {
    /// Puts it there.
    fn register(&self, registry: &mut Registry, name: &str, help: &str);
}

impl<M: MetricKind> Registered for M {
    fn register(&self, registry: &mut Registry, name: &str, help: &str) {
        register(registry, name, help, self.clone());
    }
}

impl<M: MetricKind, const N: usize> Registered for Labelled<M, N>
where
    Family<LabelSet<N>, M, fn() -> M>: Metric,
{
    fn register(&self, registry: &mut Registry, name: &str, help: &str) {
        register(registry, name, help, self.family.clone());
    }
}

/// The library adds `_total` to counters and the unit to the name by itself.
fn register(registry: &mut Registry, name: &str, help: &str, metric: impl Metric) {
    let name = name.strip_suffix("_total").unwrap_or(name);
    match name.strip_suffix("_seconds") {
        Some(bare) => registry.register_with_unit(bare, help, Unit::Seconds, metric),
        None => registry.register(name, help, metric),
    }
}

/// The page for Prometheus.
pub fn page(registry: &Registry) -> String {
    let mut text = String::new();
    // Writing into a string does not fail.
    let _ = encode(&mut text, registry);
    text
}

/// A gauge's value; what is larger than it can show is shown as the largest.
pub fn whole(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// Declares a struct of metrics: per line a field, its type with its labels, its name on the page and its
/// help.
macro_rules! metrics {
    ($(#[$doc:meta])* pub struct $name:ident {
        $($field:ident: $kind:ident $([$($label:ident),+])? = $metric:literal, $help:literal;)*
    }) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name {
            registry: $crate::runtime::metrics::Registry,
            $(#[doc = $help] pub $field: $crate::runtime::metrics::metrics!(@type $kind $([$($label),+])?),)*
        }

        impl Default for $name {
            fn default() -> Self {
                use $crate::runtime::metrics::Registered;
                let mut registry = $crate::runtime::metrics::Registry::default();
                $(
                    let $field = $crate::runtime::metrics::metrics!(@new $kind $([$($label),+])?);
                    $field.register(&mut registry, $metric, $help);
                )*
                Self { registry, $($field),* }
            }
        }

        impl $name {
            /// Every metric of this program.
            pub const DECLARED: &'static [$crate::runtime::metrics::Declaration] = &[$(
                $crate::runtime::metrics::Declaration {
                    name: $metric,
                    kind: <$kind as $crate::runtime::metrics::MetricKind>::NAME,
                    labels: &[$($(stringify!($label)),+)?],
                    help: $help,
                },
            )*];

            /// The page for Prometheus.
            pub fn page(&self) -> String {
                $crate::runtime::metrics::page(&self.registry)
            }
        }
    };
    (@type $kind:ident) => { $kind };
    (@type $kind:ident [$($label:ident),+]) => {
        $crate::runtime::metrics::Labelled<$kind, { [$(stringify!($label)),+].len() }>
    };
    (@new $kind:ident) => { <$kind as $crate::runtime::metrics::MetricKind>::zero() };
    (@new $kind:ident [$($label:ident),+]) => {
        $crate::runtime::metrics::Labelled::<$kind, _>::new([$(stringify!($label)),+])
    };
}
pub(crate) use metrics;
