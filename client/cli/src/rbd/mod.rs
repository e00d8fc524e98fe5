//! `loligo rbd …`, in the looks of `rbd`.

mod bench;

use crate::args::{Global, RbdCommand};
use crate::cluster::{self, Connection, ImageSpec};
use crate::output::{self, Align, Failure, Outcome, Progress, Table, bytes, list, number, string};
use loligo_client::{CreateOptions, ImageError, ImageHeader};
use loligo_config::units::ByteLen;
use serde_json::{Value, json};

/// `loligo rbd …`
///
/// # Errors
/// When the cluster cannot be reached or refuses.
pub fn run(global: &Global, command: RbdCommand) -> Outcome {
    match command {
        RbdCommand::Create { image, size, object_size } => {
            create(global, &ImageSpec::from_args(&image)?, CreateOptions { size, order: object_size })
        }
        RbdCommand::Ls { spec, pool, long } => {
            let pool = spec
                .or(pool)
                .ok_or_else(|| Failure::usage("no pool was given", "name it: loligo rbd ls POOL"))?;
            ls(global, &pool, long)
        }
        RbdCommand::Info { image } => info(global, &ImageSpec::from_args(&image)?),
        RbdCommand::Du { spec, pool, image } => {
            du(global, spec.as_deref(), pool.as_deref(), image.as_deref())
        }
        RbdCommand::Resize { image, size, allow_shrink } => {
            resize(global, &ImageSpec::from_args(&image)?, size, allow_shrink)
        }
        RbdCommand::Rm { image, force } => rm(global, &ImageSpec::from_args(&image)?, force),
        RbdCommand::Rename { from, to, pool } => rename(global, &from, &to, pool.as_deref()),
        RbdCommand::Bench(args) => bench::run(global, &args),
    }
}

fn create(global: &Global, spec: &ImageSpec, options: CreateOptions) -> Outcome {
    let header = cluster::connect(global)?.create(&spec.pool, &spec.image, options)?;
    output::show(global.format, &info_json(&spec.image, &header), |_| String::new());
    Ok(())
}

fn ls(global: &Global, pool: &str, long: bool) -> Outcome {
    let mut cluster = cluster::connect(global)?;
    let entries = cluster.list(pool)?;
    if !long {
        let names = Value::from(entries.iter().map(|entry| entry.name.clone()).collect::<Vec<_>>());
        output::show(global.format, &names, |_| {
            entries.iter().map(|entry| entry.name.clone() + "\n").collect()
        });
        return Ok(());
    }
    let mut images = Vec::new();
    for entry in &entries {
        // One that is removed meanwhile is not there.
        if let Ok(header) = cluster.info(pool, &entry.name) {
            let id = format!("{:x}", header.id.0);
            images.push(json!({ "image": entry.name, "id": id, "size": header.size, "format": 2 }));
        }
    }
    output::show(global.format, &Value::from(images), plain_long);
    Ok(())
}

fn plain_long(images: &Value) -> String {
    let columns = [
        ("NAME", Align::Left),
        ("SIZE", Align::Right),
        ("PARENT", Align::Left),
        ("FMT", Align::Right),
        ("PROT", Align::Left),
        ("LOCK", Align::Left),
    ];
    let mut table = Table::new(&columns);
    for image in images.as_array().into_iter().flatten() {
        let (name, size) = (string(image, "image").to_owned(), bytes(number(image, "size")));
        table.row(vec![
            name,
            size,
            String::new(),
            number(image, "format").to_string(),
            String::new(),
            String::new(),
        ]);
    }
    table.to_string()
}

fn info_json(name: &str, header: &ImageHeader) -> Value {
    let id = format!("{:x}", header.id.0);
    json!({
        "name": name,
        "id": id,
        "size": header.size,
        "objects": header.objects(),
        "order": header.order,
        "object_size": header.object_size(),
        "snapshot_count": header.snapshots.len(),
        "block_name_prefix": format!("rbd_data.{id}"),
        "format": 2,
        "features": header.features.names().collect::<Vec<_>>(),
        "op_features": [],
        "flags": [],
        "create_timestamp": output::moment(header.created),
        "access_timestamp": output::moment(header.accessed),
        "modify_timestamp": output::moment(header.modified),
    })
}

fn plain_info(info: &Value) -> String {
    let joined = |key: &str| {
        let words: Vec<&str> = list(info, key).iter().filter_map(Value::as_str).collect();
        words.join(", ")
    };
    let (size, objects) = (bytes(number(info, "size")), number(info, "objects"));
    let (order, object) = (number(info, "order"), bytes(number(info, "object_size")));
    let lines = [
        format!("rbd image '{}':", string(info, "name")),
        format!("\tsize {size} in {objects} objects"),
        format!("\torder {order} ({object} objects)"),
        format!("\tsnapshot_count: {}", number(info, "snapshot_count")),
        format!("\tid: {}", string(info, "id")),
        format!("\tblock_name_prefix: {}", string(info, "block_name_prefix")),
        format!("\tformat: {}", number(info, "format")),
        format!("\tfeatures: {}", joined("features")),
        format!("\top_features: {}", joined("op_features")),
        format!("\tflags: {}", joined("flags")),
        format!("\tcreate_timestamp: {}", string(info, "create_timestamp")),
        format!("\taccess_timestamp: {}", string(info, "access_timestamp")),
        format!("\tmodify_timestamp: {}", string(info, "modify_timestamp")),
    ];
    lines.map(|line| line + "\n").concat()
}

fn info(global: &Global, spec: &ImageSpec) -> Outcome {
    let header = cluster::connect(global)?.info(&spec.pool, &spec.image)?;
    output::show(global.format, &info_json(&spec.image, &header), plain_info);
    Ok(())
}

fn du(global: &Global, spec: Option<&str>, pool: Option<&str>, image: Option<&str>) -> Outcome {
    let whole_pool = |name: &str| !name.contains('/') && pool.is_none();
    let (pool, images) = match (spec, image) {
        (Some(name), None) if whole_pool(name) => (name.to_owned(), None),
        (Some(name), None) | (None, Some(name)) => {
            let spec = ImageSpec::parse(name, pool)?;
            (spec.pool, Some(spec.image))
        }
        (None, None) => match pool {
            Some(pool) => (pool.to_owned(), None),
            None => {
                return Err(Failure::usage(
                    "no image was given",
                    "write POOL/IMAGE, or a pool for all its images",
                ));
            }
        },
        (Some(_), Some(_)) => return Err(Failure::usage("two images were given", "give one of them")),
    };
    let mut cluster = cluster::connect(global)?;
    let all = images.is_none();
    let names = match images {
        Some(image) => vec![image],
        None => cluster.list(&pool)?.into_iter().map(|entry| entry.name).collect(),
    };
    let answer = usage(&mut cluster, &pool, &names, all)?;
    output::show(global.format, &answer, |answer| plain_du(answer, all));
    Ok(())
}

fn usage(cluster: &mut Connection, pool: &str, names: &[String], tolerant: bool) -> Outcome<Value> {
    let (mut provisioned, mut used, mut images) = (0u64, 0u64, Vec::new());
    for name in names {
        let mut progress = Progress::new(&format!("counting {pool}/{name}"), false);
        let header = match cluster.info(pool, name) {
            Err(_) if tolerant => continue, // Removed meanwhile.
            header => header?,
        };
        let usage = match cluster.du(pool, name, &mut |at| progress.set(at.done, at.total)) {
            Err(_) if tolerant => continue,
            usage => usage?,
        };
        provisioned = provisioned.saturating_add(usage.provisioned);
        used = used.saturating_add(usage.used);
        images.push(json!({
            "name": name,
            "id": format!("{:x}", header.id.0),
            "provisioned_size": usage.provisioned,
            "used_size": usage.used,
        }));
    }
    Ok(json!({ "images": images, "total_provisioned_size": provisioned, "total_used_size": used }))
}

fn plain_du(answer: &Value, total: bool) -> String {
    let columns = [("NAME", Align::Left), ("PROVISIONED", Align::Right), ("USED", Align::Right)];
    let mut table = Table::new(&columns);
    for image in list(answer, "images") {
        let sizes = ["provisioned_size", "used_size"].map(|key| bytes(number(image, key)));
        let [provisioned, used] = sizes;
        table.row(vec![string(image, "name").to_owned(), provisioned, used]);
    }
    if total {
        let sizes = ["total_provisioned_size", "total_used_size"].map(|key| bytes(number(answer, key)));
        let [provisioned, used] = sizes;
        table.row(vec!["<TOTAL>".to_owned(), provisioned, used]);
    }
    table.to_string()
}

fn resize(global: &Global, spec: &ImageSpec, size: u64, allow_shrink: bool) -> Outcome {
    let mut cluster = cluster::connect(global)?;
    let header = cluster.info(&spec.pool, &spec.image)?;
    if size < header.size && !allow_shrink {
        return Err(Failure::new(
            format!(
                "{spec} has {}: making it smaller loses what is beyond {}",
                bytes(header.size),
                bytes(size)
            ),
            "add --allow-shrink if that is what you want",
        ));
    }
    let mut progress = Progress::new("resizing", false);
    cluster.resize(&spec.pool, &spec.image, ByteLen(size), &mut |at| progress.set(at.done, at.total))?;
    drop(progress);
    let header = cluster.info(&spec.pool, &spec.image)?;
    output::show(global.format, &info_json(&spec.image, &header), |_| String::new());
    Ok(())
}

fn rm(global: &Global, spec: &ImageSpec, force: bool) -> Outcome {
    let mut cluster = cluster::connect(global)?;
    let mut progress = Progress::new(&format!("removing {spec}"), false);
    let removed = cluster.remove(&spec.pool, &spec.image, force, &mut |at| progress.set(at.done, at.total));
    if let Err(error @ ImageError::InUse { .. }) = &removed {
        return Err(Failure::new(
            error.to_string(),
            "stop who serves or uses it, or add --force: they lose it then",
        ));
    }
    removed?;
    drop(progress);
    output::show(global.format, &json!({ "removed": spec.to_string() }), |_| String::new());
    Ok(())
}

fn rename(global: &Global, from: &str, to: &str, pool: Option<&str>) -> Outcome {
    let from = ImageSpec::parse(from, pool)?;
    let to =
        if to.contains('/') { ImageSpec::parse(to, None)? } else { ImageSpec::parse(to, Some(&from.pool))? };
    if to.pool != from.pool {
        return Err(Failure::usage(
            "an image cannot be renamed into another pool",
            "keep the pool, or copy its data",
        ));
    }
    cluster::connect(global)?.rename(&from.pool, &from.image, &to.image)?;
    output::show(global.format, &json!({ "renamed": to.to_string() }), |_| String::new());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use loligo_config::id::ImageId;

    #[test]
    fn info_looks_as_rbds() {
        let options = CreateOptions { size: 1 << 20, order: 22 };
        let header = ImageHeader::new("plain", ImageId(0x1049_f465_13bd), options, 0);
        let mut info = info_json("plain", &header);
        for key in ["create_timestamp", "access_timestamp", "modify_timestamp"] {
            info[key] = json!("Mon Nov 30 21:27:42 2026");
        }
        let expected = "rbd image 'plain':
\tsize 1 MiB in 1 objects
\torder 22 (4 MiB objects)
\tsnapshot_count: 0
\tid: 1049f46513bd
\tblock_name_prefix: rbd_data.1049f46513bd
\tformat: 2
\tfeatures: layering
\top_features: 
\tflags: 
\tcreate_timestamp: Mon Nov 30 21:27:42 2026
\taccess_timestamp: Mon Nov 30 21:27:42 2026
\tmodify_timestamp: Mon Nov 30 21:27:42 2026
";
        assert_eq!(plain_info(&info), expected);
    }

    #[test]
    fn du_and_ls_look_as_rbds() {
        let image = |name: &str, size: u64, used: u64| {
            json!({
                "name": name, "image": name, "size": size, "format": 2, "provisioned_size": size, "used_size": used,
            })
        };
        let answer = json!({
            "images": [image("child", 8 << 20, 3 << 20), image("striped", 2 << 20, 1_572_864)],
            "total_provisioned_size": 10 << 20, "total_used_size": 4_718_592,
        });
        let expected =
            "NAME     PROVISIONED     USED\nchild          8 MiB    3 MiB\nstriped        2 MiB  1.5 MiB\n";
        assert_eq!(plain_du(&answer, false), expected);
        assert!(plain_du(&answer, true).ends_with("<TOTAL>       10 MiB  4.5 MiB\n"));
        let expected = "NAME      SIZE  PARENT  FMT  PROT  LOCK\nchild    8 MiB            2\nstriped  2 MiB            2\n";
        assert_eq!(plain_long(&answer["images"]), expected);
    }
}
