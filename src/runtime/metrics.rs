//! Metrics that are declared once: name, type, labels and help of each are in one place, and the reference in
//! the documents is made from these declarations.
//!
//! Names follow Prometheus' rules (base units, `_total` on counters and on nothing else);
//! tests/commands/reference.rs checks them. Must never be given more or fewer label values than a metric
//! declares: the compiler counts them.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::{Metric, Registry, Unit};

pub use prometheus_client::metrics::counter::Counter;
pub use prometheus_client::metrics::gauge::Gauge;
pub use prometheus_client::metrics::histogram::Histogram;

/// A gauge of numbers that are not whole.
pub(crate) type FloatGauge = Gauge<f64, AtomicU64>;

/// The upper bounds of every histogram, in seconds: from a check of one object to a full round over a large
/// cluster.
const BUCKETS: [f64; 8] = [0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Declaration {
    pub name: &'static str,
    /// `counter`, `gauge` or `histogram`.
    pub kind: &'static str,
    pub labels: &'static [&'static str],
    pub help: &'static str,
}

pub trait MetricKind: Metric + Clone {
    const NAME: &'static str;
    /// Makes one that has counted nothing.
    const ZERO: fn() -> Self;
}

impl MetricKind for Counter {
    const NAME: &'static str = "counter";
    const ZERO: fn() -> Self = Self::default;
}

impl MetricKind for Gauge {
    const NAME: &'static str = "gauge";
    const ZERO: fn() -> Self = Self::default;
}

impl MetricKind for FloatGauge {
    const NAME: &'static str = "gauge";
    const ZERO: fn() -> Self = Self::default;
}

impl MetricKind for Histogram {
    const NAME: &'static str = "histogram";
    const ZERO: fn() -> Self = || Self::new(BUCKETS);
}

type LabelSet<const N: usize> = [(&'static str, String); N];

/// A metric with labels: one of its kind per combination of their values.
#[derive(Debug, Clone)]
pub struct Labelled<M, const N: usize> {
    names: [&'static str; N],
    family: Family<LabelSet<N>, M, fn() -> M>,
}

impl<M: MetricKind, const N: usize> Labelled<M, N>
where
    Family<LabelSet<N>, M, fn() -> M>: Metric,
{
    pub(crate) fn add(page: &mut Page, name: &str, help: &str, names: [&'static str; N]) -> Self {
        Self { names, family: page.add(name, help, Family::new_with_constructor(M::ZERO)) }
    }
}

impl<M: MetricKind, const N: usize> Labelled<M, N> {
    fn labels(&self, values: [&str; N]) -> LabelSet<N> {
        let mut values = values.into_iter();
        self.names.map(|name| (name, values.next().unwrap_or_default().to_owned()))
    }

    pub(crate) fn with(&self, values: [&str; N]) -> M {
        self.family.get_or_create(&self.labels(values)).clone()
    }

    /// Takes the one with these values off the page: what it was about is gone.
    pub(crate) fn remove(&self, values: [&str; N]) {
        self.family.remove(&self.labels(values));
    }

    pub(crate) fn clear(&self) {
        self.family.clear();
    }
}

impl<const N: usize> Labelled<Counter, N> {
    pub(crate) fn inc(&self, values: [&str; N]) {
        self.with(values).inc();
    }
}

/// The metrics of one program, as Prometheus reads them.
#[derive(Debug, Default)]
pub(crate) struct Page(Registry);

impl Page {
    /// Puts a metric onto the page. The library adds `_total` to counters and the unit to the name by itself.
    pub(crate) fn add<M: Metric + Clone>(&mut self, name: &str, help: &str, metric: M) -> M {
        let name = name.strip_suffix("_total").unwrap_or(name);
        match name.strip_suffix("_seconds") {
            Some(bare) => self.0.register_with_unit(bare, help, Unit::Seconds, metric.clone()),
            None => self.0.register(name, help, metric.clone()),
        }
        metric
    }

    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        // Writing into a string does not fail.
        let _ = encode(&mut text, &self.0);
        text
    }
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
            page: $crate::runtime::metrics::Page,
            $(#[doc = $help] pub $field: $crate::runtime::metrics::metrics!(@type $kind $([$($label),+])?),)*
        }

        impl Default for $name {
            fn default() -> Self {
                let mut page = $crate::runtime::metrics::Page::default();
                $(let $field = $crate::runtime::metrics::metrics!(
                    @add page $metric $help $kind $([$($label),+])?
                );)*
                Self { page, $($field),* }
            }
        }

        impl $name {
            pub const DECLARED: &'static [$crate::runtime::metrics::Declaration] = &[$(
                $crate::runtime::metrics::Declaration {
                    name: $metric,
                    kind: <$kind as $crate::runtime::metrics::MetricKind>::NAME,
                    labels: &[$($(stringify!($label)),+)?],
                    help: $help,
                },
            )*];

            pub fn page(&self) -> String {
                self.page.text()
            }
        }
    };
    (@type $kind:ident) => { $kind };
    (@type $kind:ident [$($label:ident),+]) => {
        $crate::runtime::metrics::Labelled<$kind, { [$(stringify!($label)),+].len() }>
    };
    (@add $page:ident $metric:literal $help:literal $kind:ident) => {
        $page.add($metric, $help, <$kind as $crate::runtime::metrics::MetricKind>::ZERO())
    };
    (@add $page:ident $metric:literal $help:literal $kind:ident [$($label:ident),+]) => {
        $crate::runtime::metrics::Labelled::add(&mut $page, $metric, $help, [$(stringify!($label)),+])
    };
}
pub(crate) use metrics;
